"""A saved sequence: tokens and what the engine's memory holds of them, with what it belongs to.

A magic and a version, the length of a JSON header, the header, the tokens as 32-bit numbers, the engine's bytes. The
file may come from anywhere: every size is checked before memory is taken, and the engine checks what it reads again.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from engine.files import replacing
from engine.json_file import UNREADABLE

MAGIC = b"LDSQ"
VERSION = 1
MAX_HEADER_BYTES = 1 << 16
TOKEN_BYTES = 4
_PREFIX = struct.Struct("<4sII")


class SequenceFileError(Exception):
    """A file that cannot be used or written, with a sentence."""


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model: what the engine calls it and a digest of its metadata; not where its layers are."""

    description: str
    architecture: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_params: int
    size_bytes: int
    metadata: str


class SequenceHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sequence fits. `streams`: how many sequences the memory kept in buffers of their own.

    `digest` is of tokens and state. Without flash attention values are stored another way than with it. `images`: what
    the tokens -1, -2... stand for.
    """

    model: ModelIdentity
    type_k: str
    type_v: str
    swa_full: bool
    streams: int
    flash_attention: bool | None
    tokens: int
    state_bytes: int
    digest: str
    images: tuple[str, ...] = ()


def write_sequence(path: Path, tokens: list[int], state: memoryview, header: Callable[[str], SequenceHeader]) -> int:
    """Write a file whole or not at all; returns its size. `header` makes the header for a digest.

    Raises:
        SequenceFileError: it cannot be written there.
    """
    token_bytes = _token_bytes(tokens)
    text = msgspec.json.encode(header(_digest(token_bytes, state)))
    try:
        with replacing(path) as unfinished, unfinished.open("xb") as file:
            file.write(_PREFIX.pack(MAGIC, VERSION, len(text)))
            file.write(text)
            file.write(token_bytes)
            file.write(state)
            size_bytes = file.tell()
    except OSError as error:
        raise SequenceFileError(f"{path.name} cannot be written: {error.strerror or error}.") from None
    return size_bytes


class SequenceReader:
    """Reads a file in two steps: the header, which says whether the rest is of use, then that."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def header(self) -> SequenceHeader:
        """Read the header.

        Raises:
            SequenceFileError: it is no such file, is damaged, or is not all there.
        """
        with self._open() as file:
            header, begin = self._read_header(file)
            wanted = begin + header.tokens * TOKEN_BYTES + header.state_bytes
            if file.seek(0, os.SEEK_END) != wanted:
                raise self._damaged("its length is not what it says")
        return header

    def content(self) -> tuple[list[int], bytes]:
        """Read tokens and state, of a file whose header was found to be of use.

        Raises:
            SequenceFileError: it is damaged or cannot be read.
        """
        with self._open() as file:
            header, _ = self._read_header(file)
            token_bytes = file.read(header.tokens * TOKEN_BYTES)
            state = file.read(header.state_bytes)
        if len(token_bytes) + len(state) != header.tokens * TOKEN_BYTES + header.state_bytes:
            raise self._damaged("it ends too early")
        if _digest(token_bytes, state) != header.digest:
            raise self._damaged("its content is not what was written")
        return _tokens(token_bytes), state

    def _open(self) -> BinaryIO:
        try:
            # before it is opened: that alone waits for ever for a pipe
            if self._path.exists() and not self._path.is_file():
                raise SequenceFileError(f"{self._path.name} is not a regular file.")
            return self._path.open("rb")
        except OSError as error:
            raise SequenceFileError(f"{self._path.name} cannot be read: {error.strerror or error}.") from None

    def _read_header(self, file: BinaryIO) -> tuple[SequenceHeader, int]:
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
            raise SequenceFileError(f"{self._path.name} is not a saved sequence.")
        _, version, length = _PREFIX.unpack(prefix)
        if version != VERSION:
            raise SequenceFileError(
                f"{self._path.name} is of version {version} and this program reads version {VERSION}."
            )
        if length > MAX_HEADER_BYTES:
            raise self._damaged("its header is too long")
        try:
            header = msgspec.json.decode(file.read(length), type=SequenceHeader)
        except UNREADABLE:
            raise self._damaged("its header cannot be read") from None
        if header.tokens <= 0 or header.state_bytes <= 0:
            raise self._damaged("it holds nothing")
        return header, file.tell()

    def _damaged(self, reason: str) -> SequenceFileError:
        return SequenceFileError(f"{self._path.name} is damaged: {reason}.")


def _digest(token_bytes: bytes, state: bytes | memoryview) -> str:
    digest = hashlib.sha256(token_bytes)
    digest.update(state)
    return digest.hexdigest()


def _token_bytes(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def _tokens(token_bytes: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(token_bytes) // TOKEN_BYTES}i", token_bytes))
