"""The newest version as its publisher signed it. The bytes come from anybody: nothing is read before the signature is.

The document is `{"release": TEXT, "signature": BASE64}`; signed (Ed25519) is `PREFIX` with the bytes of TEXT behind it,
which is JSON again (`docs/contract.md`). A signature alone would let a server show an old document for ever, or again:
so each says until when it holds, and has a number that never goes back.
"""

from __future__ import annotations

import base64
import binascii
import re
from datetime import date, timedelta
from typing import TypeVar

import msgspec

from engine.hub.settings import is_safe_url
from engine.json_file import UNREADABLE
from engine.releases.errors import ReleaseError

PREFIX = b"layerdeck release\n"
FORMAT = 1
MAX_DOCUMENT_BYTES = 16 * 1024
MAX_SERIAL = (1 << 53) - 1
"""What JSON of every language can tell."""
MAX_SUMMARY = 300
MAX_PAGE = 500
SIGNATURE_BYTES = 64
KEY_BYTES = 32
CLOCK_LEEWAY = timedelta(days=1)
"""Days begin at other times elsewhere."""
_VERSION = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6}){1,3}")
_T = TypeVar("_T", bound=msgspec.Struct)


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """A version that is out. `serial` grows with every document; both days are included, in UTC."""

    format: int
    serial: int
    version: str
    page: str
    published: date
    expires: date
    summary: str = ""


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    release: str
    signature: str


def read_release(data: bytes, key: bytes, *, today: date, seen_serial: int = 0) -> Release:
    """Return what `data` says, signed with the private half of `key` (32 bytes), on the day `today` (UTC).

    Raises:
        ReleaseError: for whatever else; `older` where a document with a `serial` under `seen_serial` is shown.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise ReleaseError("size", f"The answer is longer than {MAX_DOCUMENT_BYTES} bytes, so it is none of ours.")
    envelope = _decode(data, _Envelope)
    signed = envelope.release.encode("utf-8", "surrogatepass")
    _check_signature(signed, envelope.signature, key)
    if _decode(signed, _Format).format != FORMAT:
        raise ReleaseError(
            "form", "The answer is written for later versions of Layerdeck; look at the page of its releases."
        )
    release = _decode(signed, Release)
    _check_values(release)
    if release.published > today + CLOCK_LEEWAY:
        raise ReleaseError(
            "clock", f"The answer is of {release.published}, and here it is {today}; check the clock of this computer."
        )
    if release.expires < today:
        raise ReleaseError(
            "expired",
            f"The answer held until {release.expires}: the server shows an old one, or the clock of this computer is "
            "wrong. Try again later.",
        )
    if release.serial < seen_serial:
        raise ReleaseError("older", "The server shows an older answer than it did before, which is not believed.")
    return release


def is_newer(version: str, installed: str) -> bool:
    """Return whether `version` comes after the `installed` one; False where that cannot be told."""
    ours, theirs = _numbers(installed), _numbers(version)
    return ours is not None and theirs is not None and theirs > ours


def read_key(text: str) -> bytes:
    """Return the public key that `text` tells in base64.

    Raises:
        ReleaseError: where it is none.
    """
    key = _base64(text)
    if key is None or len(key) != KEY_BYTES:
        raise ReleaseError("signature", "This copy of Layerdeck has no key to check releases with; install it again.")
    return key


class _Format(msgspec.Struct, frozen=True):
    format: int


def _decode(data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE:
        raise ReleaseError("form", "The answer is no word about a release; check the address.") from None


def _check_signature(signed: bytes, signature: str, key: bytes) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(key).verify(_base64(signature) or b"", PREFIX + signed)
    except (InvalidSignature, ValueError):
        raise ReleaseError(
            "signature", "The answer is not signed by those who publish Layerdeck, so it is not believed."
        ) from None


def _check_values(release: Release) -> None:
    """Refuse what no publisher of ours would sign, so that what is shown is bounded and can be opened."""
    sound = (
        0 < release.serial <= MAX_SERIAL
        and _numbers(release.version) is not None
        and len(release.page) <= MAX_PAGE
        and is_safe_url(release.page)
        and len(release.summary) <= MAX_SUMMARY
        and release.published <= release.expires
    )
    if not sound:
        raise ReleaseError("form", "The answer has values that no release has; look at the page of its releases.")


def _numbers(version: str) -> tuple[int, ...] | None:
    """Return the numbers of a version without zeros at the end, None for what is none."""
    if _VERSION.fullmatch(version) is None:
        return None
    numbers = [int(part) for part in version.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _base64(text: str) -> bytes | None:
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        return None
