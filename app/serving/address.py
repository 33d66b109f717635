"""Addresses of an API server: which computers reach them, and why an address cannot be used.

Does not import Qt.
"""

from __future__ import annotations

import errno
import ipaddress
import platform
import socket

from engine.base.errors import ArgumentError
from engine.base.language import tr


def is_loopback(host: str) -> bool:
    """Return whether only this computer can reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_names(host: str) -> frozenset[str]:
    """Return the host names under which other computers reach a server on `host`; empty if none can reach it."""
    if is_loopback(host):
        return frozenset()
    # Requests for other hosts are refused, because of DNS rebinding. `.local` is mDNS.
    return frozenset({host.lower(), platform.node().lower(), f"{platform.node().lower()}.local"} - {""})


def address_error(host: str, plain: bool, needs_key: bool) -> str:
    """Return a message for the user, with a remedy, if a server must not listen on `host`; empty if it may.

    `plain`: whether requests without TLS are allowed. `needs_key`: whether requests need an API key.
    """
    if not host.strip():
        return tr("Enter an address to listen on. With 127.0.0.1 only this computer can connect.")
    if is_loopback(host):
        return ""
    if not needs_key:
        return tr("Other computers can reach {host}. Turn on “Require the key”, or listen on 127.0.0.1.", host=host)
    if not plain:
        return tr(
            "Other computers can reach {host}, and anyone on the network could read the requests. Turn on “Allow "
            "unencrypted requests”, or use layerdeck-cli serve with --tls-cert.",
            host=host,
        )
    return ""


def listen_error(error: ArgumentError, host: str, port: int) -> str:
    """Return a message for users of the window: why the server cannot listen on `host` and `port`, and a remedy.

    `error`: the error of the attempt to listen.
    """
    # The server's own sentence names options of the command line.
    cause = error.__context__
    if isinstance(cause, socket.gaierror | UnicodeError):
        return tr(
            "{host} is not the address of a computer. Enter 127.0.0.1, or an address of this computer.", host=host
        )
    match getattr(cause, "errno", None):
        case errno.EADDRINUSE:
            return tr("Another program uses port {port}. Choose another port.", port=port)
        case errno.EACCES:
            return tr(
                "Port {port} needs administrator rights, which Layerdeck does not have. Choose a port above 1023.",
                port=port,
            )
        case errno.EADDRNOTAVAIL:
            return tr(
                "This computer does not have the address {host}. Enter 127.0.0.1, or an address of this computer.",
                host=host,
            )
    return error.summary()


def reached_url(host: str, port: int) -> str:
    """Return the URL for programs on this computer that connect to a server on `host` and `port`.

    0.0.0.0 becomes 127.0.0.1, and :: becomes ::1.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{port}"
    if address.is_unspecified:
        host = "::1" if address.version == 6 else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
