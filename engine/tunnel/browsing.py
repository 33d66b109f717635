"""Looking for machines that announce themselves, in a child: what comes from a network is parsed away from the window.

All of it is untrusted. What is told is bounded in number and length; a name that somebody else uses too is told twice.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence

from zeroconf import Error, InterfaceChoice, ServiceBrowser, ServiceInfo, ServiceListener, Zeroconf
from zeroconf import IPVersion as Version

from engine.confinement import code_folders, confine, system_folders
from engine.devices.endpoint import MAX_DEVICE_BYTES, parse_endpoint
from engine.errors import EngineError
from engine.protocol.messages import Message
from engine.protocol.network import NearbyMachine, NearbyMachines
from engine.texts import one_line, shorten
from engine.tunnel.announcing import SERVICE, VERSION
from engine.tunnel.identity import is_fingerprint
from engine.tunnel.pairings import MAX_NAME

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
