"""What tells one machine from all others: the digest of its certificate."""

from __future__ import annotations

import hashlib
import re

MAX_CERTIFICATE_BYTES = 4096
_SHOWN_DIGITS = 16
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


def fingerprint_of(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate (DER) in hexadecimal."""
    return hashlib.sha256(certificate).hexdigest()


def shown_fingerprint(fingerprint: str) -> str:
    """Return the beginning of a fingerprint as people compare it."""
    digits = fingerprint[:_SHOWN_DIGITS]
    return " ".join(digits[start : start + 4] for start in range(0, len(digits), 4))


def is_fingerprint(text: str) -> bool:
    """Return whether `text` is a whole fingerprint as rig files have it."""
    return _FINGERPRINT.fullmatch(text) is not None
