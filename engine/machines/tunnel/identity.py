"""The key and certificate of this machine (its identity), created once and stored in a file; certificate fingerprints.

Paired machines store each other's certificate and compare it byte by byte. So the name in a certificate has no meaning,
and a certificate never expires.

`cryptography` is imported by the functions that need it, because the window imports this module at its start.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from engine.base.errors import EngineError
from engine.base.files import read_at_most, write_private

MAX_FILE_BYTES = 1 << 16
_FROM, _UNTIL = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)


class IdentityError(EngineError):
    """The key and certificate of this machine cannot be read or created."""

    kind = "argument"


class Identity(Struct, frozen=True):
    """The key and certificate of this machine.

    `path`: file with key and certificate (PEM), which TLS reads.
    `certificate`: the certificate as DER.
    """

    path: Path
    certificate: bytes

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.certificate)


def read_identity(path: Path) -> Identity:
    """Return the identity of this machine. Its file is created if it does not exist; only this user can read it.

    Raises:
        IdentityError: if it can be neither read nor created.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    try:
        if not path.exists():
            _make(path)
        data = read_at_most(path, MAX_FILE_BYTES, timeout_s=0.0)
        certificate = x509.load_pem_x509_certificate(data).public_bytes(Encoding.DER)
        # A restored copy may have lost its rights, and whoever reads the key can call as this machine.
        if os.name != "nt" and path.stat().st_mode & 0o077:
            path.chmod(0o600)
    except OSError as error:
        raise IdentityError(
            f"The key of this computer in {path} cannot be used ({error.strerror or error}); make the folder writable."
        ) from None
    except ValueError:
        raise IdentityError(
            f"The key of this computer in {path} is damaged; remove the file, then pair with other computers again."
        ) from None
    return Identity(path, certificate)


def is_certificate(data: bytes) -> bool:
    """Return whether these bytes are a single DER certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    if len(data) > MAX_CERTIFICATE_BYTES:
        return False
    try:
        # Compared with its own encoding: the fingerprint is over these bytes, so they must hold a certificate and
        # nothing else.
        return x509.load_der_x509_certificate(data).public_bytes(Encoding.DER) == data
    except (ValueError, x509.InvalidVersion):
        return False


def _make(path: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    # A random name, because TLS looks up trusted issuers by name, and equal names would be ambiguous.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"layerdeck-{secrets.token_hex(8)}")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        # Not a CA: who trusts this certificate must not trust others that its key signed.
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    data = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate.public_bytes(Encoding.PEM)
    write_private(path, data)


MAX_CERTIFICATE_BYTES = 4096
_SHOWN_DIGITS = 16
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


def fingerprint_of(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate (DER) in hexadecimal."""
    return hashlib.sha256(certificate).hexdigest()


def shown_fingerprint(fingerprint: str) -> str:
    """Return the first 16 digits of a fingerprint in groups of four, which people compare."""
    digits = fingerprint[:_SHOWN_DIGITS]
    return " ".join(digits[start : start + 4] for start in range(0, len(digits), 4))


def is_fingerprint(text: str) -> bool:
    """Return whether `text` is a complete fingerprint: 64 hexadecimal digits in lower case."""
    return _FINGERPRINT.fullmatch(text) is not None
