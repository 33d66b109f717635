"""CPace, a key exchange that two sides complete alike only where both know the same code (draft-irtf-cfrg-cpace-21).

Suite CPACE-X25519-SHA512. Whoever listens or stands in the middle learns nothing that a guess could be tried against
later: each guess costs a whole exchange with a side that counts them. The multiplications are those of `cryptography`;
ours is the map from a hash to a point of the curve, and the draft's encodings. What is named here is named as there.
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

SHARE_BYTES = 32
_DSI = b"CPace255"
_HASH_BLOCK_BYTES = 128
"""Of SHA-512."""
_P = 2**255 - 19
_A = 486662
"""Curve25519 as y² = x³ + Ax² + x modulo P."""


class CpaceError(ValueError):
    """The other side's share is no point that an exchange may use."""


def calculate_generator(code: bytes, channel: bytes, session: bytes) -> bytes:
    """Return the point that both sides multiply: the same only for the same code, channel and session."""
    padding = bytes(max(0, _HASH_BLOCK_BYTES - 1 - len(_prefixed(code)) - len(_prefixed(_DSI))))
    digest = hashlib.sha512(prefix_free(_DSI, code, padding, channel, session)).digest()[:SHARE_BYTES]
    return _map_to_curve(int.from_bytes(digest, "little") % 2**255).to_bytes(SHARE_BYTES, "little")


def multiply(scalar: bytes, point: bytes) -> bytes:
    """Return X25519(scalar, point).

    Raises:
        CpaceError: for a point of low order, which would give a key that everybody knows.
    """
    try:
        return X25519PrivateKey.from_private_bytes(scalar).exchange(X25519PublicKey.from_public_bytes(point))
    except ValueError as error:
        raise CpaceError(str(error)) from None


def session_key(session: bytes, shared: bytes, first: tuple[bytes, bytes], second: tuple[bytes, bytes]) -> bytes:
    """Return the key of an exchange; `first` and `second` are share and associated data of who began and answered."""
    transcript = prefix_free(*first) + prefix_free(*second)
    return hashlib.sha512(prefix_free(_DSI + b"_ISK", session, shared) + transcript).digest()


def confirmation(key: bytes, role: bytes) -> bytes:
    """Return what proves to the other side that we have `key`; each role has its own."""
    return hmac.digest(hmac.digest(key, b"layerdeck pairing", "sha512"), role, "sha512")


def prefix_free(*parts: bytes) -> bytes:
    """Return `parts` one after another, each with its length before it, so that no two lists look the same."""
    return b"".join(map(_prefixed, parts))


def _prefixed(part: bytes) -> bytes:
    length, encoded = len(part), bytearray()
    while length >= 128:
        encoded.append(length & 127 | 128)
        length >>= 7
    encoded.append(length)
    return bytes(encoded) + part


def _map_to_curve(u: int) -> int:
    """Return the x coordinate that Elligator 2 gives for `u` (RFC 9380, section 6.7.1, with Z = 2)."""
    x = -_A * pow(1 + 2 * u * u, -1, _P) % _P
    square = (x * x * x + _A * x * x + x) % _P
    return x if pow(square, (_P - 1) // 2, _P) in (0, 1) else (-x - _A) % _P
