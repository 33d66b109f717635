"""The file of a saved KV state, and the check whether it fits the loaded context.

The file has a magic, a version, the length of a JSON header, the header, the tokens as 32-bit numbers, the sequence's
state as llama.cpp wrote it, and from version 2 on the states of checkpoints. It is untrusted: every size is checked
before memory is allocated, and llama.cpp checks each state when it reads it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from engine.base.files import replacing
from engine.base.json_file import UNREADABLE
from engine.planning.settings.kinds import Value
from engine.planning.settings.table import KEYS, kv_state_values
from engine.runtime.child.generate.checkpoints import MOST
from engine.runtime.child.load.loaded_context import LoadedContext

MAGIC = b"LDSQ"
VERSIONS = (1, 2)
MAX_HEADER_BYTES = 1 << 16
TOKEN_BYTES = 4
PIECE_BYTES = 16 << 20
"""Number of bytes after which a save reports progress, and restoring may be stopped.

Even a slow disk writes or reads them within seconds.
"""
_PREFIX = struct.Struct("<4sII")

SequenceContent = tuple[list[int], bytearray, list[tuple[int, bytearray]]]
"""Content of a saved KV state: the tokens, the state of the sequence, and the checkpoints, each as (number of tokens,
state).
"""


class SequenceFileError(Exception):
    """Error: a saved KV state cannot be read or written. The message is a sentence for the user."""


class DamagedSequenceError(SequenceFileError):
    """Error: the file cannot be restored with any model, because it is damaged, of another version, or no saved KV
    state.
    """


class ModelIdentity(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of a model: numbers that llama.cpp reports, and a digest of its metadata. It is the same in any layout.

    `metadata`: SHA-256 of all keys and values of the file's metadata.
    """

    description: str
    architecture: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_params: int
    size_bytes: int
    metadata: str


class StoredCheckpoint(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Header entry of a checkpoint (copy of an earlier state). `tokens`: length of the sequence when it was taken."""

    tokens: int
    size_bytes: int


class SequenceHeader(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Header of a saved KV state, which shows whether the loaded context can restore the state.

    `streams`: number of streams of the KV cache (`n_stream` in llama.cpp): 1 if it is unified, else `n_seq_max`.
    `flash_attention`: whether flash attention was on. Without flash attention llama.cpp stores V transposed, so the
    states differ.
    `tokens`: number of tokens.
    `state_bytes`: size in bytes of the sequence's state.
    `digest`: SHA-256 of everything after the header.
    `checkpoints`: entries of the checkpoints, ascending by tokens.
    `images`: names of the images and sounds. The token -1 stands for the first name, -2 for the second, and so on.
    `settings`: values, by key, of rarely used settings that a state depends on. Settings at their default are left out.
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
    checkpoints: tuple[StoredCheckpoint, ...] = ()
    images: tuple[str, ...] = ()
    settings: dict[str, Value] = {}

    @property
    def content_bytes(self) -> int:
        """Number of bytes after the header."""
        kept_bytes = sum(each.size_bytes for each in self.checkpoints)
        return self.tokens * TOKEN_BYTES + self.state_bytes + kept_bytes

    @property
    def is_possible(self) -> bool:
        """Whether the numbers of the header are consistent with each other."""
        # Ascending, from 1 token up to all tokens of the sequence.
        ends = [0, *(each.tokens for each in self.checkpoints), self.tokens + 1]
        sizes = [self.state_bytes, *(each.size_bytes for each in self.checkpoints)]
        return self.tokens > 0 and all(size > 0 for size in sizes) and all(one < next_ for one, next_ in pairwise(ends))


def write_sequence(
    path: Path,
    tokens: list[int],
    states: Sequence[memoryview],
    header: Callable[[str], SequenceHeader],
    progress: Callable[[], None] = lambda: None,
) -> int:
    """Write a saved KV state atomically, and return the size of the file in bytes.

    `states`: state of the sequence, then the state of each checkpoint.
    `header`: returns the file's header for the SHA-256 digest of tokens and states.
    `progress`: called after each piece of `PIECE_BYTES` that was read for the digest, and again after each piece that
    was written to the disk.

    Raises:
        SequenceFileError: the file cannot be written.
    """
    token_bytes = _token_bytes(tokens)
    text = msgspec.json.encode(header(_digest(token_bytes, states, progress)))
    # Version 1 if there are no checkpoints, so that older programs can read it.
    version = VERSIONS[0] if len(states) == 1 else VERSIONS[1]
    try:
        # A file of its own, renamed at the end: a killed child leaves no half of a state behind.
        with replacing(path) as unfinished, unfinished.open("xb") as file:
            file.write(_PREFIX.pack(MAGIC, version, len(text)))
            file.write(text)
            file.write(token_bytes)
            for piece in _pieces(states):
                file.write(piece)
                # Otherwise all of it would be written by one fsync at the end, which shows no progress.
                file.flush()
                os.fsync(file.fileno())
                progress()
            size_bytes = file.tell()
    except OSError as error:
        raise SequenceFileError(f"{path.name} cannot be written: {error.strerror or error}.") from None
    return size_bytes


class SequenceReader:
    """Reads a saved KV state in two steps: the header, which shows whether the state fits, then the content."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def header(self) -> SequenceHeader:
        """Return the header. The length of the file is checked against it.

        Raises:
            SequenceFileError: the file cannot be read, is damaged, or is not a saved KV state.
        """
        with self._open() as file:
            header, begin = self._read_header(file)
            if file.seek(0, os.SEEK_END) != begin + header.content_bytes:
                raise self._damaged("its length does not match its header")
        return header

    def content(self) -> Iterator[SequenceContent | None]:
        """Read and check the content. Yield None after each piece of `PIECE_BYTES`, then the content.

        Call `header` first.

        Raises:
            SequenceFileError: the file cannot be read, or is damaged.
        """
        with self._open() as file:
            header, _ = self._read_header(file)
            token_bytes = file.read(header.tokens * TOKEN_BYTES)
            digest = hashlib.sha256(token_bytes)
            n_bytes = len(token_bytes)
            states = [bytearray(header.state_bytes), *(bytearray(each.size_bytes) for each in header.checkpoints)]
            for piece in _pieces(states):
                n_bytes += file.readinto(piece)
                digest.update(piece)
                yield None
        # The header was read again: the file may have been replaced since `header`.
        if n_bytes != header.content_bytes:
            raise self._damaged("it ends too early")
        if digest.hexdigest() != header.digest:
            raise self._damaged("its checksum is wrong")
        lengths = [each.tokens for each in header.checkpoints]
        yield _tokens(token_bytes), states[0], list(zip(lengths, states[1:], strict=True))

    @contextmanager
    def _open(self) -> Iterator[BufferedReader]:
        try:
            # Before opening: to open a named pipe waits until somebody writes to it.
            if self._path.exists() and not self._path.is_file():
                raise SequenceFileError(f"{self._path.name} is not a regular file.")
            with self._path.open("rb") as file:
                yield file
        except OSError as error:
            raise SequenceFileError(f"{self._path.name} cannot be read: {error.strerror or error}.") from None

    def _read_header(self, file: BinaryIO) -> tuple[SequenceHeader, int]:
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
            raise DamagedSequenceError(f"{self._path.name} is not a saved KV state.")
        _, version, length = _PREFIX.unpack(prefix)
        if version not in VERSIONS:
            raise DamagedSequenceError(
                f"{self._path.name} has version {version}, but this program reads up to version {VERSIONS[-1]}."
            )
        if length > MAX_HEADER_BYTES:
            raise self._damaged("its header is too long")
        try:
            header = msgspec.json.decode(file.read(length), type=SequenceHeader)
        except UNREADABLE:
            raise self._damaged("its header cannot be read") from None
        if not header.is_possible:
            raise self._damaged("the numbers in its header cannot be read")
        return header, file.tell()

    def _damaged(self, reason: str) -> DamagedSequenceError:
        return DamagedSequenceError(f"{self._path.name} is damaged: {reason}.")


def _digest(
    token_bytes: bytes, states: Sequence[bytearray | memoryview], progress: Callable[[], None] = lambda: None
) -> str:
    digest = hashlib.sha256(token_bytes)
    for piece in _pieces(states):
        digest.update(piece)
        progress()
    return digest.hexdigest()


def _pieces(states: Sequence[bytearray | memoryview]) -> Iterator[memoryview]:
    for state in states:
        whole = memoryview(state)
        for begin in range(0, len(whole), PIECE_BYTES):
            yield whole[begin : begin + PIECE_BYTES]


def _token_bytes(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def _tokens(token_bytes: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(token_bytes) // TOKEN_BYTES}i", token_bytes))


_TEXT_BYTES = 4096
_CELL_BYTES = 64
"""Upper bound of the bytes that llama.cpp writes for each token in addition to its keys and values."""
_SLACK_BYTES = 1 << 20


def loaded_identity(loaded: LoadedContext) -> ModelIdentity:
    """Return the numbers and the digest that identify the loaded model, whatever its layout."""
    low, model = loaded.engine.low, loaded.model
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    low.llama_model_desc(model, buffer, _TEXT_BYTES)
    description = buffer.value.decode("utf-8", "replace")
    low.llama_model_meta_val_str(model, b"general.architecture", buffer, _TEXT_BYTES)
    architecture = buffer.value.decode("utf-8", "replace")
    # Fine-tunes of one model agree in all figures; names in the metadata tell them apart.
    digest = hashlib.sha256()
    for index in range(int(low.llama_model_meta_count(model))):
        for read in (low.llama_model_meta_key_by_index, low.llama_model_meta_val_str_by_index):
            read(model, index, buffer, _TEXT_BYTES)
            digest.update(buffer.value + b"\x00")
    return ModelIdentity(
        description=description,
        architecture=architecture,
        n_layer=int(low.llama_model_n_layer(model)),
        n_embd=int(low.llama_model_n_embd(model)),
        n_vocab=loaded.vocabulary_size,
        n_params=int(low.llama_model_n_params(model)),
        size_bytes=int(low.llama_model_size(model)),
        metadata=digest.hexdigest(),
    )


def header_of(
    loaded: LoadedContext, tokens: int, state_bytes: int, digest: str, checkpoints: tuple[StoredCheckpoint, ...] = ()
) -> SequenceHeader:
    """Return the header for a saved sequence of the loaded context.

    `tokens`: number of tokens of the sequence.
    `state_bytes`: size in bytes of the sequence's state.
    `digest`: SHA-256 of everything after the header.
    `checkpoints`: entries of the checkpoints, ascending by tokens.
    """
    settings = loaded.settings
    return SequenceHeader(
        model=loaded_identity(loaded),
        type_k=settings.type_k,
        type_v=settings.type_v,
        swa_full=settings.swa_full,
        streams=1 if settings.kv_unified else loaded.n_sequences,
        flash_attention=loaded.log.facts.flash_attention,
        tokens=tokens,
        state_bytes=state_bytes,
        digest=digest,
        checkpoints=checkpoints,
        settings={setting.key: value for setting, value in kv_state_values(settings).items() if setting.rare},
    )


def refusal(loaded: LoadedContext, header: SequenceHeader) -> str | None:
    """Return why a saved KV state does not fit the loaded context, as sentences; None if it fits."""
    ours = header_of(loaded, header.tokens, header.state_bytes, header.digest)
    if header.model != ours.model:
        return (
            f"It belongs to another model: {_one_line(header.model.description)}; loaded is {ours.model.description}."
        )
    if (header.type_k, header.type_v) != (ours.type_k, ours.type_v):
        return (
            f"Its cache types are {_one_line(header.type_k)} and {_one_line(header.type_v)}, those of the loaded "
            f"model {ours.type_k} and {ours.type_v}. Load with the same KV types."
        )
    if header.swa_full != ours.swa_full:
        return "It was saved with another setting of swa_full. Load with the same one."
    if header.streams != ours.streams:
        return (
            f"It was saved with {header.streams} separate sequences, but the loaded model has {ours.streams}. "
            "Load with the same n_seq_max and kv_unified."
        )
    if header.flash_attention != ours.flash_attention:
        return "It was saved with another setting of flash attention. Load with the same one."
    if header.settings != ours.settings:
        keys = [key for key in KEYS if header.settings.get(key) != ours.settings.get(key)]
        return f"It was saved with other values of {', '.join(keys) or 'some settings'}. Load with the same ones."
    if header.images and (loaded.media is None or not all(map(loaded.media.was_made_here, header.images))):
        return "It contains images or sounds that another projector read. Load with the same projector."
    if header.tokens >= loaded.context_tokens:
        return (
            f"It has {header.tokens} tokens, but the context has {loaded.context_tokens}. Load with a longer context."
        )
    # With M-RoPE an image takes more KV cells than positions, so that the tokens give no bound for its state.
    cells = loaded.context_tokens if header.images else header.tokens
    largest_bytes = max([header.state_bytes, *(each.size_bytes for each in header.checkpoints)])
    if len(header.checkpoints) > MOST or largest_bytes > _most_bytes(loaded, cells):
        return "It is larger than the whole cache of the loaded model."
    return None


def _most_bytes(loaded: LoadedContext, tokens: int) -> int:
    cache_bytes = sum(part.kv_cache_bytes + part.recurrent_bytes for part in loaded.parts() if not part.draft)
    return cache_bytes + tokens * _CELL_BYTES + _SLACK_BYTES


def _one_line(text: str) -> str:
    """Return text from an untrusted file for a message: one line, printable, at most 80 characters."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())[:80]
