"""A serving machine tells its local network that it is there (DNS-SD over multicast), for as long as it is asked to.

Only what people see in a list: name, device, memory, and the fingerprint that pairing makes sure of.
"""

from __future__ import annotations

import ipaddress
import socket
from types import TracebackType

from zeroconf import Error, InterfaceChoice, ServiceInfo, Zeroconf
from zeroconf import IPVersion as Version

from engine.errors import EngineError

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
