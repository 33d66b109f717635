"""Documents about releases, signed with a key of the tests by what publishers sign with."""

from __future__ import annotations

import base64
from datetime import date, timedelta

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from resources.release.sign import sign

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC_KEY = base64.b64encode(KEY.public_key().public_bytes_raw()).decode()
PAGE = "https://192.0.2.1/releases"


def release_values(today: date, **changed: object) -> dict[str, object]:
    """Return what a sound document says on the day `today`, with what is `changed`."""
    return {
        "format": 1,
        "serial": 7,
        "version": "9.1.0",
        "page": PAGE,
        "published": today.isoformat(),
        "expires": (today + timedelta(days=30)).isoformat(),
        "summary": "Faster, and it makes coffee.",
        **changed,
    }


def signed_release(today: date, **changed: object) -> bytes:
    """Return such a document, signed."""
    return sign(KEY, release_values(today, **changed))
