"""Signatures of engine packs: the key of this computer, keys of publishers that the user trusts, and who signed a pack.

A pack is native code, and its manifest has the hashes of its files. So only the manifest is signed (Ed25519). An
unsigned pack can be used too; while it is switched on, every list shows that its maker is unknown.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

from engine.base.errors import PackError
from engine.base.files import locked, read_at_most, write_private
from engine.base.json_file import read_struct, write_struct
from engine.base.texts import show
from engine.base.values import replace
from engine.devices.packs.manifest import Manifest

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PREFIX = "ed25519:"
MAX_PUBLISHERS = 64
_KEY_BYTES = 32
_MAX_NAME = 60
_MAX_FILE_BYTES = 1 << 16
_RING_VERSION = 1
# A signature for another purpose must not count for a pack.
_CONTEXT = b"layerdeck engine pack 1\n"

MakerKind = Literal["program", "here", "trusted", "unknown", "unsigned"]


class Maker(Struct, frozen=True):
    """The maker of an engine pack (an installable llama.cpp backend): who signed the pack.

    `kind`: "program": the pack came with the program, unsigned. "here": signed with this computer's key. "trusted":
    signed with the key of a publisher that the user trusts. "unknown": signed with any other key. "unsigned": not
    signed.
    `key`: the public key as text; empty: no signature.
    `name`: the user's name for a trusted publisher; else empty.
    """

    kind: MakerKind = "unsigned"
    key: str = ""
    name: str = ""

    @property
    def is_trusted(self) -> bool:
        return self.kind not in ("unknown", "unsigned")

    @property
    def words(self) -> str:
        """A sentence for people on who signed the engine pack (a llama.cpp backend).

        An example is "It was built on this computer."
        """
        match self.kind:
            case "program":
                return "It came with the program."
            case "here":
                return "It was built on this computer."
            case "trusted":
                return f"It is signed by {show(self.name, _MAX_NAME) or self.key}, a publisher that you trust."
            case "unknown":
                return f"It is signed with a key that you do not trust: {self.key}."
            case "unsigned":
                return "It is unsigned, so its publisher is unknown."


UNSIGNED = Maker()


class Publisher(Struct, frozen=True):
    """A public key that the user trusts, and the name that the user gave to its owner."""

    key: str
    name: str = ""


class _Ring(Struct, frozen=True):
    version: int = _RING_VERSION
    publishers: tuple[Publisher, ...] = ()


class PackKeys(Struct, frozen=True):
    """The keys that sign engine packs (installable llama.cpp backends) and that check their signatures.

    `private`: file with this computer's private key; created when the first pack is signed.
    `ring`: file with the trusted publishers.
    """

    private: Path
    ring: Path

    def own(self) -> str:
        """Return the public key of this computer; empty if no key exists yet.

        Raises:
            PackError: the file cannot be read.
        """
        if not self.private.exists():
            return ""
        return _public(self._read())

    def publishers(self) -> tuple[Publisher, ...]:
        """Return the trusted publishers; empty if the file is missing, damaged or of another version."""
        ring = read_struct(self.ring, _Ring, _MAX_FILE_BYTES, version=_RING_VERSION)
        return () if ring is None else ring.publishers

    def trust(self, key: str, name: str = "") -> None:
        """Add a publisher's key to the trusted keys. `name`: the user's name for the publisher.

        Raises:
            PackError: `key` is not a key, or cannot be stored.
        """
        key = checked_key(key)
        with self._alone() as known:
            others = tuple(each for each in known if each.key != key)
            if len(others) >= MAX_PUBLISHERS:
                raise PackError(
                    f"{MAX_PUBLISHERS} keys are trusted already. Remove one with `packs distrust KEY` first."
                )
            self._keep((*others, Publisher(key, name.strip()[:_MAX_NAME])))

    def distrust(self, key: str) -> None:
        """Remove a key from the trusted keys.

        Raises:
            PackError: the key is not among them, or they cannot be stored.
        """
        key = checked_key(key)
        with self._alone() as known:
            others = tuple(each for each in known if each.key != key)
            if len(others) == len(known):
                raise PackError(f"{key} is not trusted, so nothing changed.")
            self._keep(others)

    def maker(self, manifest: Manifest) -> Maker:
        """Return who signed the engine pack (an installable llama.cpp backend) with this manifest (its list of files).

        Raises:
            PackError: if the manifest's signature is wrong.
        """
        if not manifest.signature and not manifest.key:
            return UNSIGNED
        key = checked_key(manifest.key)
        # Only the canonical form: the signature is checked with the same key that people see and trust.
        if key != manifest.key or not _is_signed(manifest):
            raise PackError("Its signature is wrong: the pack was changed after it was signed. Download it again.")
        if key == self._own_or_none():
            return Maker("here", key)
        known = next((each for each in self.publishers() if each.key == key), None)
        return Maker("unknown", key) if known is None else Maker("trusted", key, known.name)

    def sign(self, manifest: Manifest) -> Manifest:
        """Return the manifest signed with this computer's key. The key is created if it does not exist.

        Raises:
            PackError: the key can be neither read nor created.
        """
        if not self.private.exists():
            self._make()
        key = self._read()
        unsigned = replace(manifest, key=_public(key), signature="")
        signature = base64.b64encode(key.sign(_signed_bytes(unsigned))).decode("ascii")
        return replace(unsigned, signature=signature)

    def _own_or_none(self) -> str:
        try:
            return self.own()
        except PackError:
            return ""

    def _read(self) -> Ed25519PrivateKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(read_at_most(self.private, _MAX_FILE_BYTES), None)
            # A restored copy may have lost its rights, and whoever reads the key can sign as this computer.
            if os.name != "nt" and self.private.stat().st_mode & 0o077:
                self.private.chmod(0o600)
        except (OSError, ValueError, TypeError) as error:
            raise self._unusable(getattr(error, "strerror", None) or "it is damaged") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise self._unusable("it is a key of another kind")
        return key

    def _make(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        data = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        try:
            write_private(self.private, data)
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from None

    def _unusable(self, reason: str) -> PackError:
        return PackError(
            f"The key of this computer in {self.private} cannot be used ({reason}). Remove the file to get a new key."
        )

    @contextmanager
    def _alone(self) -> Iterator[tuple[Publisher, ...]]:
        """Lock the file of publishers against changes by other processes, and yield the publishers in it.

        Raises:
            PackError: the file cannot be locked or read, or is of another version of Layerdeck. Such a file must not be
                overwritten.
        """
        try:
            self.ring.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.ring):
                ring = read_struct(self.ring, _Ring, _MAX_FILE_BYTES, version=_RING_VERSION)
                if self.ring.exists() and ring is None:
                    raise PackError(
                        f"The trusted keys in {self.ring} cannot be changed: the file is damaged or of another version "
                        "of Layerdeck. Remove it to begin anew."
                    )
                yield () if ring is None else ring.publishers
        except OSError as error:
            raise PackError(f"The trusted keys in {self.ring} cannot be changed: {error.strerror or error}.") from None

    def _keep(self, publishers: Iterable[Publisher]) -> None:
        def fail(reason: str, *, location: str = "", source: str = "") -> PackError:
            return PackError(": ".join(filter(None, (source, location, reason))))

        write_struct(self.ring, _Ring(publishers=tuple(publishers)), what="trusted keys", fail=fail)


def checked_key(text: str) -> str:
    """Return a public key in its canonical form: "ed25519:" and base64.

    Raises:
        PackError: if `text` is not a key.
    """
    before, found, encoded = text.strip().partition(PREFIX)
    try:
        data = base64.b64decode(encoded, validate=True) if found and not before else b""
    except (binascii.Error, ValueError):
        data = b""
    if len(data) != _KEY_BYTES:
        raise PackError(
            f"{show(text, 80)} is not the key of a publisher; such a key looks like {PREFIX}... with 44 characters."
        )
    return PREFIX + base64.b64encode(data).decode("ascii")


def _is_signed(manifest: Manifest) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(manifest.key.removeprefix(PREFIX), validate=True))
        signed = _signed_bytes(replace(manifest, signature=""))
        key.verify(base64.b64decode(manifest.signature, validate=True), signed)
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed_bytes(manifest: Manifest) -> bytes:
    """Return the bytes that are signed: a fixed prefix, then the manifest without its signature as JSON in a fixed
    order.
    """
    return _CONTEXT + msgspec.json.encode(manifest, order="deterministic")


def _public(key: Ed25519PrivateKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    data: bytes = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return PREFIX + base64.b64encode(data).decode("ascii")
