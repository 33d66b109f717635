"""Machines in the local network that lend devices (DNS-SD over multicast): the announcement, and the search in a child.

An announcement states the machine's name, its device and memory, and the fingerprint that pairing verifies. The child
parses the packets, because they are untrusted: results are bounded in number and length, and a name that two machines
use is listed twice.
"""

from __future__ import annotations

import ipaddress
import sys
import threading
from collections.abc import Callable, Sequence

from zeroconf import Error, InterfaceChoice, ServiceBrowser, ServiceInfo, ServiceListener, Zeroconf
from zeroconf import IPVersion as Version

from engine.base.confinement import NEARBY, confine
from engine.base.errors import EngineError
from engine.base.texts import one_line, shorten
from engine.devices.endpoint import MAX_DEVICE_BYTES, parse_endpoint
from engine.devices.own_addresses import nearest_first, network_addresses, own_networks
from engine.machines.tunnel.identity import is_fingerprint
from engine.machines.tunnel.pairings import MAX_NAME
from engine.runtime.protocol.messages import Message
from engine.runtime.protocol.network import NearbyMachine, NearbyMachines

MAX_MACHINES = 32
MAX_ASKED = 8
"""Largest number of names that are queried at the same time because their announcement was incomplete."""
MAX_DEVICE = 40
RESOLVE_MS = 3000


def browse(interfaces: Sequence[str], on_found: Callable[[Message], None]) -> None:
    """Start the search on these interfaces (empty: all), in threads that run until the process ends.

    `on_found`: called with all machines found, at the start and after each change.

    Raises:
        EngineError: if this system does not accept multicast.
    """
    # Before the first packet is parsed: announcements come from anyone in the network.
    _give_up_rights()
    try:
        zeroconf = Zeroconf(interfaces=list(interfaces) or InterfaceChoice.All, ip_version=Version.V4Only)
    except (OSError, ValueError, Error, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EngineError(
            f"This computer cannot search the local network ({reason}); write the address instead."
        ) from None
    on_found(NearbyMachines(machines=()))
    ServiceBrowser(zeroconf, SERVICE, listener=_Nearby(on_found))


class _Nearby(ServiceListener):
    """The machines that announce themselves now. Each change is reported with the whole list.

    The methods are called in zeroconf's threads.
    """

    def __init__(self, on_found: Callable[[Message], None]) -> None:
        self._on_found = on_found
        self._lock = threading.Lock()
        self._places = threading.Semaphore(MAX_ASKED)
        self._machines: dict[str, NearbyMachine] = {}

    def add_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        info = ServiceInfo(type_, name)
        # A machine that announces a name without details is queried in a thread, so that it does not delay later ones.
        if info.load_from_cache(zc):
            self._take(name, info)
        elif self._places.acquire(blocking=False):
            threading.Thread(target=self._ask, args=(zc, name, info), name="resolve", daemon=True).start()

    def _ask(self, zc: Zeroconf, name: str, info: ServiceInfo) -> None:
        try:
            if info.request(zc, RESOLVE_MS):
                self._take(name, info)
        finally:
            self._places.release()

    def _take(self, name: str, info: ServiceInfo) -> None:
        addresses = nearest_first(info.parsed_addresses(Version.V4Only), own_networks())
        machine = read_machine(addresses, info.port, info.properties)
        with self._lock:
            # A machine that is listed may change its announcement even if the list is full.
            is_room = name in self._machines or len(self._machines) < MAX_MACHINES
            if machine is None or not is_room or self._machines.get(name) == machine:
                return
            self._machines[name] = machine
            self._report()

    def update_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        self.add_service(zc, type_, name)

    def remove_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        with self._lock:
            if self._machines.pop(name, None) is not None:
                self._report()

    def _report(self) -> None:
        self._on_found(NearbyMachines(machines=tuple(sorted(self._machines.values(), key=lambda each: each.name))))


def read_machine(
    addresses: Sequence[str], port: int | None, properties: dict[bytes, bytes | None]
) -> NearbyMachine | None:
    """Return the machine of an announcement, with texts and numbers bounded; None if it is not valid.

    `addresses`, `port`: IP addresses of the machine, of which the first is used, and TCP port of its listener.
    `properties`: the DNS TXT record of the announcement.
    """
    texts = {
        # At most 16 properties of 256 bytes: the rest of an announcement is dropped unread.
        key.decode("utf-8", "replace"): (value or b"")[:256].decode("utf-8", "replace")
        for key, value in list(properties.items())[:16]
    }
    fingerprint, memory = texts.get("fingerprint", ""), texts.get("memory", "")
    if texts.get("v") != VERSION or not addresses or not is_fingerprint(fingerprint):
        return None
    try:
        host, number = parse_endpoint(f"{addresses[0]}:{port}")
    except ValueError:
        return None
    # Bounded before `int`: the largest 64-bit size has 20 digits, and no device has so much.
    is_size = memory.isascii() and memory.isdecimal() and len(memory) < 20
    return NearbyMachine(
        name=shorten(one_line(texts.get("name", "")), MAX_NAME) or "unnamed",
        endpoint=f"{host}:{number}",
        device=shorten(one_line(texts.get("device", "")), MAX_DEVICE),
        total_bytes=min(int(memory), MAX_DEVICE_BYTES) if is_size else 0,
        fingerprint=fingerprint,
    )


def _give_up_rights() -> None:
    confine(NEARBY)
    if sys.platform.startswith("linux"):
        # RLIMIT_DATA counts private writable memory, and not the files and libraries that are mapped.
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (NEARBY.memory_bytes, NEARBY.memory_bytes))


SERVICE = "_layerdeck-rpc._tcp.local."
VERSION = "1"
MAX_LABEL_BYTES = 45
"""Longest name of a machine in a DNS label, in bytes.

A label has at most 63 bytes. After the name come the first digits of the fingerprint, and a number if another machine
has announced the same label.
"""
_LABEL_DIGITS = 12


class Announcement:
    """Announces this machine in the local network while its `with` block runs.

    `host`: address of the interface on which the machine is announced; the unspecified address means all interfaces but
    bridges to containers.
    `device`, `total_bytes`: name and memory of the lent device, which other computers show in their list of machines.
    `fingerprint`: fingerprint of this machine's certificate.

    Raises, on entering:
        EngineError: if this system does not send multicast.
    """

    def __init__(self, name: str, host: str, port: int, *, device: str, total_bytes: int, fingerprint: str) -> None:
        self._name, self._host, self._port = name, host, port
        self._texts = {
            "v": VERSION,
            "name": name,
            "device": device,
            "memory": str(total_bytes),
            "fingerprint": fingerprint,
        }
        self._zeroconf: Zeroconf | None = None

    def __enter__(self) -> Announcement:
        try:
            everywhere = ipaddress.ip_address(self._host).is_unspecified
            hosts = list(network_addresses()) if everywhere else [self._host]
            self._zeroconf = Zeroconf(interfaces=hosts, ip_version=Version.V4Only)
            self._zeroconf.register_service(self._info(hosts), allow_name_change=True)
        except (OSError, ValueError, Error, RuntimeError) as error:
            self._close()
            reason = getattr(error, "strerror", None) or error
            raise EngineError(
                f"This computer cannot announce itself on {self._host} ({reason}); leave --announce out, "
                "and tell the other one its address."
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _info(self, hosts: list[str]) -> ServiceInfo:
        # A dot would begin another DNS label. The limit is one of bytes, and "ignore" drops a character that it cuts.
        label = self._name.replace(".", "-").encode()[:MAX_LABEL_BYTES].decode("utf-8", "ignore")
        # Unique from the start: two machines of one name that begin at the same time both find the name free, and a
        # search then lists one of them.
        label += f"-{self._texts['fingerprint'][:_LABEL_DIGITS]}"
        return ServiceInfo(
            SERVICE,
            f"{label}.{SERVICE}",
            port=self._port,
            properties=self._texts,
            # Two machines may have the same name, but not the same fingerprint.
            server=f"layerdeck-{self._texts['fingerprint'][:16]}.local.",
            parsed_addresses=hosts,
        )

    def _close(self) -> None:
        if self._zeroconf is not None:
            self._zeroconf.close()
            self._zeroconf = None
