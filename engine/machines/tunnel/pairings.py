"""The file of pairings: clients that may use this machine, and servers that this machine may use."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from engine.base.errors import DocumentError, EngineError
from engine.base.files import locked
from engine.base.json_file import UNREADABLE, read_file, write_struct
from engine.base.language import tr
from engine.base.texts import show
from engine.machines.tunnel.identity import fingerprint_of, shown_fingerprint

VERSION = 1
MAX_PAIRINGS = 64
MAX_NAME = 40
Role = Literal["client", "server"]
"""Role of the other machine: a `client` may use this machine, a `server` may be used by this machine."""


class PairingError(EngineError):
    """A pairing does not exist, or could not be made."""

    kind = "argument"


class Pairing(Struct, frozen=True):
    """A pairing with one machine in one role: a client may use this machine, a server may be used by this machine.

    `name`: name of the other machine.
    `certificate`: certificate of the other machine, as base64 of DER.
    `endpoint`: address of a server (host:port), empty for a client.
    `paired_s`: time of the pairing in seconds since 1970.
    """

    role: Role
    name: str
    certificate: str
    endpoint: str = ""
    paired_s: int = 0

    @property
    def der(self) -> bytes:
        """The certificate of the other machine as DER; empty if the stored text is not valid."""
        try:
            return base64.b64decode(self.certificate, validate=True)
        except (binascii.Error, ValueError):
            return b""

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.der)

    @property
    def words(self) -> str:
        """Name of the other machine and the first digits of its fingerprint, for people to compare."""
        return f"{self.name} ({shown_fingerprint(self.fingerprint)})"


class _Book(Struct, frozen=True):
    version: int = VERSION
    pairings: tuple[Pairing, ...] = ()


def make_pairing(role: Role, name: str, certificate: bytes, endpoint: str = "", paired_s: int = 0) -> Pairing:
    """Return a pairing with the machine that shows `certificate` (DER).

    `role`: role of that machine.
    `name`: name that the machine gives itself; unprintable characters are escaped, and a long name is cut.
    `endpoint`: address of a server (host:port), empty for a client.
    `paired_s`: time of the pairing in seconds since 1970.
    """
    cleaned = show(" ".join(name.split()), MAX_NAME) or "unnamed"
    return Pairing(role, cleaned, base64.b64encode(certificate).decode(), endpoint, paired_s)


class PairingStore:
    """The file of pairings. Every call reads the file again, because window, command line and servers share it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self, role: Role | None = None) -> tuple[Pairing, ...]:
        """Return the stored pairings with this role, or all if `role` is None.

        Empty if the file is missing or damaged, cannot be read, or was written by another version of Layerdeck.
        """
        try:
            kept = self._read() or ()
        except DocumentError:
            return ()
        return tuple(each for each in kept if role in (None, each.role))

    def find(self, role: Role, fingerprint: str) -> Pairing | None:
        """Return the pairing with this role and fingerprint; None if there is none."""
        return next((each for each in self.all(role) if each.fingerprint == fingerprint), None)

    def forgotten(self, role: Role, fingerprints: Collection[str]) -> frozenset[str]:
        """Return those of `fingerprints` that have no stored pairing with this role.

        Empty if the file of pairings cannot be read, because then it is not known which pairings were deleted.
        """
        try:
            kept = self._read()
        except DocumentError:
            return frozenset()
        if kept is None:
            return frozenset()
        return frozenset(fingerprints) - {each.fingerprint for each in kept if each.role == role}

    def server(self, text: str) -> Pairing:
        """Return the paired server that `text` names: its name, its endpoint or the start of its fingerprint.

        Raises:
            PairingError: if none or several match.
        """
        return _only(text, self.all("server"))

    def add(self, pairing: Pairing) -> None:
        """Store a pairing. It replaces a pairing with the same machine in the same role.

        A damaged file is renamed to `.damaged` first.

        Raises:
            DocumentError: if the file cannot be read or written, or another version of Layerdeck has written it.
        """
        # Reading and writing under one lock: another process may pair or forget a machine in between.
        with self._alone():
            kept = self._read()
            if kept is None:
                with suppress(OSError):  # Then the file cannot be written either, which is told.
                    self._path.replace(self._path.with_suffix(".damaged"))
            others = (each for each in kept or () if not _same(each, pairing))
            # In the order of pairing, so the oldest pairings are dropped.
            self._write([*others, pairing][-MAX_PAIRINGS:])

    def forget(self, text: str) -> tuple[Pairing, ...]:
        """Delete the pairings with one machine in both roles, and return them.

        `text`: name of the machine, its endpoint, or the start of its fingerprint.

        Raises:
            PairingError: if none or several machines match.
            DocumentError: if the file cannot be read or written, or another version of Layerdeck has written it.
        """
        with self._alone():
            kept = self._read() or ()
            fingerprint = _only(text, kept).fingerprint
            self._write(each for each in kept if each.fingerprint != fingerprint)
            return tuple(each for each in kept if each.fingerprint == fingerprint)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the file of pairings against changes by other processes, if the system has file locks."""
        with ExitStack() as stack:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self._path))
            except OSError as error:
                reason = f"the folder of the list of pairings cannot be written ({error.strerror})"
                raise DocumentError(reason, source=self._path.name) from error
            yield

    def _read(self) -> tuple[Pairing, ...] | None:
        """Return all stored pairings; empty if the file is missing, None if it is damaged.

        Raises:
            DocumentError: if the file cannot be read, or another version of Layerdeck has written it.
        """
        try:
            data = read_file(self._path, what="list of pairings", fail=DocumentError)
            book = msgspec.json.decode(data, type=_Book)
        except DocumentError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return ()
            raise
        except UNREADABLE:
            return None
        if book.version != VERSION:
            raise DocumentError(
                tr("the list of pairings is of another version of Layerdeck; use the version that wrote it"),
                source=self._path.name,
            )
        return tuple(each for each in book.pairings if each.der)

    def _write(self, pairings: Iterable[Pairing]) -> None:
        write_struct(self._path, _Book(pairings=tuple(pairings)), what="list of pairings", fail=DocumentError)


def _same(one: Pairing, other: Pairing) -> bool:
    return (one.role, one.fingerprint) == (other.role, other.fingerprint)


def _only(text: str, pairings: Iterable[Pairing]) -> Pairing:
    digits = text.replace(" ", "").lower()
    by_fingerprint: dict[str, Pairing] = {}
    for each in pairings:
        # From four digits on: a shorter text would match some fingerprint by accident.
        of_fingerprint = len(digits) >= 4 and each.fingerprint.startswith(digits)
        # An empty text is no name: the endpoint of a client is empty.
        if (text and text in (each.name, each.endpoint)) or of_fingerprint:
            by_fingerprint[each.fingerprint] = each
    if len(by_fingerprint) == 1:
        return next(iter(by_fingerprint.values()))
    if not by_fingerprint:
        raise PairingError(f'No computer is paired under "{show(text, 80)}"; `layerdeck-cli rig peers` lists them.')
    names = ", ".join(each.words for each in by_fingerprint.values())
    raise PairingError(f'"{show(text, 80)}" is more than one computer: {names}; write the fingerprint.')
