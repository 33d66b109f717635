"""Where releases are announced, and the one request for what is said there."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from engine.gguf.quoting import quote
from engine.hub.settings import is_safe_url
from engine.hub.web import open_url
from engine.releases.errors import ReleaseError
from engine.releases.release import MAX_DOCUMENT_BYTES, Release, read_key, read_release
from resources.loader import read_text

RESOURCE = "releases.json"
TIMEOUT_S = 10.0
"""For a connection, and for a line that says nothing."""
WHOLE_S = 30.0
"""For all of it: a server that drips is left."""


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ships with the program: `address`, empty where this copy names none, and the public `key` in base64."""

    address: str
    key: str


def shipped_source() -> Source:
    """Return the source that this copy came with."""
    return msgspec.json.decode(read_text(RESOURCE), type=Source)


def check_address(address: str) -> str:
    """Return an address that may be asked: https, or this machine itself.

    Raises:
        ReleaseError: for any other.
    """
    if not address:
        raise ReleaseError(
            "address", "This copy of Layerdeck does not say where its releases are announced; enter an address."
        )
    if not is_safe_url(address):
        raise ReleaseError(
            "address", f"{quote(address)} is no address to ask for releases; use one that begins with https://."
        )
    return address


def ask(
    address: str,
    key: str,
    *,
    seen_serial: int = 0,
    clock: Callable[[], float] = time.monotonic,
    timeout_s: float = TIMEOUT_S,
) -> Release:
    """Ask `address` for the newest version. Blocks. Nothing is sent but the request.

    Raises:
        HubError: where the server is not reached or gives no document.
        ReleaseError: where what it gives is not believed.
    """
    public = read_key(key)
    data = _fetch(check_address(address), clock, timeout_s)
    return read_release(data, public, today=datetime.now(UTC).date(), seen_serial=seen_serial)


def _fetch(address: str, clock: Callable[[], float], timeout_s: float) -> bytes:
    end_s = clock() + WHOLE_S
    data = bytearray()
    with open_url(address, timeout_s=timeout_s) as response:
        # One byte more than may be: what is longer is known to be.
        while len(data) <= MAX_DOCUMENT_BYTES and (part := response.read_some(MAX_DOCUMENT_BYTES + 1 - len(data))):
            data += part
            if clock() > end_s:
                raise ReleaseError("slow", "The server takes too long for a short answer; try again later.")
    return bytes(data)
