"""Serving machines in the local network (DNS-SD over multicast): announced by themselves, and looked for in a child.

An announcement has what people see in a list: name, device, memory, and the fingerprint that pairing makes sure of.
What comes from a network is parsed away from the window, and all of it is untrusted: what is passed on is bounded in
number and length, and a name that somebody else uses too is listed twice.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from zeroconf import Error, InterfaceChoice, ServiceBrowser, ServiceInfo, ServiceListener, Zeroconf
from zeroconf import IPVersion as Version

from engine.base.confinement import code_folders, confine, system_folders
from engine.base.errors import EngineError
from engine.base.texts import one_line, shorten
from engine.devices.endpoint import MAX_DEVICE_BYTES, parse_endpoint
from engine.machines.tunnel.identity import is_fingerprint
from engine.machines.tunnel.pairings import MAX_NAME
from engine.runtime.protocol.messages import Message
from engine.runtime.protocol.network import NearbyMachine, NearbyMachines

MAX_MACHINES = 32
MAX_ASKED = 8
"""Names at once that are asked for what was not announced with them; others are taken once they tell it."""
MAX_DEVICE = 40
RESOLVE_MS = 3000
MEMORY_BYTES = 256 << 20
"""What this process may take: whoever announces without end fills its tables, and ends it."""


def browse(interfaces: Sequence[str], tell: Callable[[Message], None]) -> None:
    """Begin to look on these interfaces, or all, and go on in threads until the process ends.

    Raises:
        EngineError: where this system takes no multicast.
    """
    _give_up_rights()
    try:
        zeroconf = Zeroconf(interfaces=list(interfaces) or InterfaceChoice.All, ip_version=Version.V4Only)
    except (OSError, ValueError, Error, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EngineError(
            f"This computer cannot look for others in its network ({reason}); write the address instead."
        ) from None
    tell(NearbyMachines(machines=()))
    ServiceBrowser(zeroconf, SERVICE, listener=_Nearby(tell))


class _Nearby(ServiceListener):
    """What is there now; every change is told whole. Called in threads of zeroconf."""

    def __init__(self, tell: Callable[[Message], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._places = threading.Semaphore(MAX_ASKED)
        self._machines: dict[str, NearbyMachine] = {}

    def add_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        info = ServiceInfo(type_, name)
        # Who announces a name and then says nothing of it is waited for apart, and not by those who come after it.
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
        machine = read_machine(info.parsed_addresses(Version.V4Only), info.port, info.properties)
        with self._lock:
            is_room = name in self._machines or len(self._machines) < MAX_MACHINES
            if machine is None or not is_room or self._machines.get(name) == machine:
                return
            self._machines[name] = machine
            self._say()

    def update_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        self.add_service(zc, type_, name)

    def remove_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        with self._lock:
            if self._machines.pop(name, None) is not None:
                self._say()

    def _say(self) -> None:
        self._tell(NearbyMachines(machines=tuple(sorted(self._machines.values(), key=lambda each: each.name))))


def read_machine(
    addresses: Sequence[str], port: int | None, properties: dict[bytes, bytes | None]
) -> NearbyMachine | None:
    """Return what an announcement says, within bounds; None for one that is not to be understood."""
    texts = {
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
    is_size = memory.isascii() and memory.isdecimal() and len(memory) < 20
    return NearbyMachine(
        name=shorten(one_line(texts.get("name", "")), MAX_NAME) or "unnamed",
        endpoint=f"{host}:{number}",
        device=shorten(one_line(texts.get("device", "")), MAX_DEVICE),
        total_bytes=min(int(memory), MAX_DEVICE_BYTES) if is_size else 0,
        fingerprint=fingerprint,
    )


def _give_up_rights() -> None:
    confine(readable=(*code_folders(), *system_folders()), writable=())
    if sys.platform.startswith("linux"):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))


SERVICE = "_layerdeck-rpc._tcp.local."
VERSION = "1"
MAX_LABEL_BYTES = 60
"""A DNS label has 63; two machines of one name get a number."""


class Announcement:
    """Announced from the start of its context to its end, on the interface of `host` alone where that is one.

    Raises, on entering:
        EngineError: where this system sends no multicast.
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
            interfaces = InterfaceChoice.All if everywhere else [self._host]
            self._zeroconf = Zeroconf(interfaces=interfaces, ip_version=Version.V4Only)
            self._zeroconf.register_service(self._info(everywhere), allow_name_change=True)
        except (OSError, ValueError, Error, RuntimeError) as error:
            self._close()
            reason = getattr(error, "strerror", None) or error
            raise EngineError(
                f"This computer cannot announce itself on {self._host} ({reason}); leave --announce out, "
                "and tell the other one its address."
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _info(self, everywhere: bool) -> ServiceInfo:
        label = self._name.replace(".", "-").encode()[:MAX_LABEL_BYTES].decode("utf-8", "ignore")
        hosts = _own_addresses() if everywhere else [self._host]
        return ServiceInfo(
            SERVICE,
            f"{label}.{SERVICE}",
            port=self._port,
            properties=self._texts,
            server=f"layerdeck-{self._texts['fingerprint'][:16]}.local.",
            parsed_addresses=hosts,
        )

    def _close(self) -> None:
        if self._zeroconf is not None:
            self._zeroconf.close()
            self._zeroconf = None


def _own_addresses() -> list[str]:
    import ifaddr

    found = (address.ip for adapter in ifaddr.get_adapters() for address in adapter.ips if address.is_IPv4)
    return [str(each) for each in found if not str(each).startswith("127.")] or [socket.gethostbyname("localhost")]
