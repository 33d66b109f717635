"""Parses the header of one GGUF file: metadata, without long arrays, and the tensor table."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from msgspec import Struct

from engine.base.errors import ModelFileError
from engine.base.language import tr
from engine.base.texts import clean, quote
from engine.base.units import MIB
from engine.model.gguf.byte_source import ByteSource
from engine.model.gguf.model_file import LazyArray, MetadataValue, TensorInfo
from engine.model.gguf.tensor_table import read_tensors

# The numbers "ggml", "ggmf", "ggjt" and "ggla", little-endian.
_GGML_MAGICS = (b"lmgg", b"fmgg", b"tjgg", b"algg")
_CONVERT = tr("convert the model to GGUF with llama.cpp's convert_hf_to_gguf.py")


def describe_foreign_file(start: bytes) -> str:
    """Return a sentence on a file that is not GGUF. `start`: up to 512 bytes from its beginning."""
    if not start.strip(b"\0"):
        return tr("holds only zero bytes at its start; the download is incomplete, so download the file again")
    if start[:4] in _GGML_MAGICS:
        return tr("is in GGML's old format, from before GGUF; get the model as GGUF")
    # PyTorch writes zip archives since 1.6.
    if start[:4] == b"PK\x03\x04":
        return tr("is a zip archive or a PyTorch checkpoint, not GGUF; {convert}", convert=_CONVERT)
    # Pickle's PROTO opcode, with protocol 2 or 4.
    if start[:2] == b"\x80\x02" or start[:2] == b"\x80\x04":
        return tr("is a Python pickle (a PyTorch checkpoint), not GGUF; {convert}", convert=_CONVERT)
    # safetensors begins with the length of its JSON header, in 8 bytes.
    if start[8:9] == b"{" and start[4:8] == b"\0\0\0\0":
        return tr("is a safetensors file, not GGUF; {convert}", convert=_CONVERT)
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return tr("is a web page, not GGUF; download the file itself, not its page")
    if text.startswith(b"version https://git-lfs"):
        return tr("is a Git LFS pointer, not the model; fetch the model with `git lfs pull`")
    if text.startswith((b"{", b"[")):
        return tr("is a JSON file, not GGUF")
    return tr("is not a GGUF file")


MAX_KEY_BYTES = 65_535  # GGUF specification

# Ours, far above any model known, so that a damaged file costs neither minutes nor memory.
MAX_STRINGS = 16 * MIB
MAX_KEPT_BYTES = 16 * MIB
MAX_KEPT_TEXT_BYTES = 1 * MIB
MAX_KEPT_ELEMENTS = 4096
"""Largest number of elements of a stored array of numbers; longer arrays, such as token scores and types, are skipped.
"""

_NEXT_KEY = bytes(7) + b"tokenizer."
"""Bytes with which the metadata key after a vocabulary begins.

These are the upper 7 bytes of the key's length, which are 0, and the beginning of its text.
"""
_LENGTH_BYTES = 8
_MOST_TEXT_BYTES = 32
"""Assumed upper limit of a vocabulary's average token length, in bytes, to guess where the vocabulary ends.

The average of most vocabularies is 6 to 10 bytes.
"""

_U32, _U64, _ARRAY_HEAD = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<IQ")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALAR_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {number: struct.Struct(f"<{code}") for number, code in _SCALAR_CODES.items()}


class MetadataReader:
    """Reads the metadata entries of a GGUF header.

    The memory and time that one file can cost are limited, because a damaged file can state any number.

    `metadata`: the values that were read, by key.
    `arrays`: locations of the arrays whose values were not read, by key.
    `file_index`: number of the file among the model's files, for `arrays`.
    `guess`: whether to find the end of a vocabulary by searching for the key after it, instead of reading the length of
    each string.
    """

    def __init__(self, source: ByteSource, *, file_index: int, guess: bool = False) -> None:
        self.metadata: dict[str, MetadataValue] = {}
        self.arrays: dict[str, LazyArray] = {}
        self._source = source
        self._file_index = file_index
        self._guess = guess
        self._kept_bytes = 0
        self._n_strings = 0

    def read(self, n_pairs: int) -> None:
        """Read `n_pairs` metadata entries (key and value) from the current position."""
        for _ in range(n_pairs):
            start = self._source.position
            key = self._source.take_name(MAX_KEY_BYTES, "a metadata key")
            self._keep(len(key))
            # llama.cpp refuses doubled keys as well (gguf.cpp); which value counts would be a guess.
            if key in self.metadata:
                raise self._source.error(f"has the metadata key {quote(key)} twice; it is damaged", offset=start)
            self.metadata[key] = self._value(key)

    def _keep(self, n_bytes: int) -> None:
        self._kept_bytes += n_bytes
        if self._kept_bytes > MAX_KEPT_BYTES:
            raise self._source.error("has more metadata than any model; it is damaged")

    def _value(self, key: str) -> MetadataValue:
        source, what = self._source, f"the value of {quote(key)}"
        (kind,) = source.take(_U32, what)
        if kind == _STRING:
            return self._text(what)
        if kind == _ARRAY:
            return self._array(key, what)
        if kind not in _SCALARS:
            raise source.error(f"has a value of unknown type {kind} for {quote(key)}; it is damaged")
        (value,) = source.take(_SCALARS[kind], what)
        return _as_value(kind, value)

    def _text(self, what: str) -> str | None:
        (length,) = self._source.take(_U64, what)
        if length > MAX_KEPT_TEXT_BYTES:
            self._source.skip(length, what)
            return None
        self._keep(length)
        # Free text for people may be cut anywhere by the tool that wrote it; that makes no model unreadable.
        return self._source.take_bytes(length, what).decode("utf-8", errors="replace")

    def _array(self, key: str, what: str) -> MetadataValue:
        source = self._source
        start = source.position
        kind, count = source.take(_ARRAY_HEAD, what)
        if kind == _STRING:
            # The budget is for all arrays of the file: many small arrays cost as much time as a large one.
            self._n_strings += count
            if self._n_strings > MAX_STRINGS:
                raise source.error(
                    f"claims {count} strings for {quote(key)}, more than any model has; it is damaged", offset=start
                )
            # No forecast reads a vocabulary, and its strings would be most of the memory of a model's header.
            self.arrays[key] = LazyArray("string", count, self._file_index, source.position)
            if not (self._guess and self._find_next_key(count)):
                source.skip_strings(count, what)
            return None
        if kind not in _SCALARS:
            raise source.error(
                f"has array elements of unknown type {kind} for {quote(key)}; it is damaged", offset=start
            )
        element = _SCALARS[kind]
        if count > MAX_KEPT_ELEMENTS:
            self.arrays[key] = LazyArray(element.format[1:], count, self._file_index, source.position)
            source.skip(count * element.size, what)
            return None
        self._keep(count * element.size)
        values = struct.Struct(f"<{count}{element.format[1:]}")
        return tuple(_as_value(kind, value) for value in source.take(values, what))

    def _find_next_key(self, count: int) -> bool:
        """Skip `count` strings by a search for the key that seems to follow them. Return whether a key was found.

        If none was found, the position does not change.
        """
        source = self._source
        start = source.position
        # Every string has its length before it: the key cannot come sooner.
        lengths_bytes = count * _LENGTH_BYTES
        if count <= MAX_KEPT_ELEMENTS or lengths_bytes > source.remaining_bytes:
            return False
        source.position += lengths_bytes
        # The lowest byte of the key's length is before the others.
        if source.find(_NEXT_KEY, count * _MOST_TEXT_BYTES) and source.position > start + lengths_bytes:
            source.position -= 1
            return True
        source.position = start
        return False


def _as_value(kind: int, value: int | float) -> int | float | bool:
    return value != 0 if kind == _BOOL else value


MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Ours, far above any model known, so that a damaged file costs neither minutes nor memory.
MAX_PAIRS = 65_536
MAX_TENSORS = 131_072

_COUNTS = struct.Struct("<QQ")
# A pair: length of the key, one letter, type, one byte. A tensor: length of the name, one letter, number of dimensions,
# one dimension, type, offset.
_SMALLEST_PAIR_BYTES = 8 + 1 + 4 + 1
_SMALLEST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


class FileHeader(Struct, frozen=True):
    """The header of one GGUF file.

    `metadata`: the values that were read, by key.
    `arrays`: locations of the arrays whose values were not read, by key.
    `tensors`: the tensor table, with offsets from the start of the file.
    """

    version: int
    metadata: Mapping[str, MetadataValue]
    arrays: Mapping[str, LazyArray]
    tensors: tuple[TensorInfo, ...]


def skim_header(source: ByteSource, *, file_index: int = 0) -> FileHeader:
    """Parse the header at the start of `source` quickly, for lists of models: the strings of a vocabulary are skipped.

    The end of the vocabulary is guessed by the key that follows it. The guess is used only if everything after it is
    valid. So damage inside the vocabulary is not noticed; a model that is opened is read with `read_header`.

    `file_index`: the file's number among the model's files.

    Raises:
        ModelFileError: if the bytes are not a GGUF header that llama.cpp would read.
    """
    try:
        return _read(source, file_index, guess=True)
    except ModelFileError:
        # A wrong guess and a damaged file look alike; reading everything tells them apart.
        source.position = 0
        return _read(source, file_index, guess=False)


def read_header(source: ByteSource, *, file_index: int = 0) -> FileHeader:
    """Parse the header at the start of `source`. `file_index`: the file's number among the model's files.

    Raises:
        ModelFileError: if the bytes are not a GGUF header that llama.cpp would read.
    """
    return _read(source, file_index, guess=False)


def _read(source: ByteSource, file_index: int, *, guess: bool) -> FileHeader:
    version = _read_version(source)
    n_tensors, n_pairs = source.take(_COUNTS, "its header")
    _check_counts(source, n_tensors, n_pairs)
    reader = MetadataReader(source, file_index=file_index, guess=guess)
    reader.read(n_pairs)
    alignment = _alignment(source, reader.metadata)
    tensors = read_tensors(source, n_tensors, alignment, file_index=file_index)
    return FileHeader(version, reader.metadata, reader.arrays, tuple(tensors))


def _read_version(source: ByteSource) -> int:
    if source.size_bytes == 0:
        raise source.error("is empty")
    start = source.take_bytes(min(source.size_bytes, 512), "its header")
    if not start.startswith(MAGIC):
        raise source.error(describe_foreign_file(start), offset=0)
    source.position = len(MAGIC)
    (version,) = source.take(_U32, "its header")
    if version in VERSIONS:
        return int(version)
    source.position = len(MAGIC)
    # A big-endian file has its version in the other byte order.
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *VERSIONS):
        raise source.error("is a big-endian GGUF file, which this computer cannot load; get the little-endian one")
    if version == 1:
        raise source.error("is GGUF version 1, which llama.cpp no longer reads; get a newer file of the model")
    raise source.error(f"is GGUF version {version}; versions 2 and 3 can be read")


def _check_counts(source: ByteSource, n_tensors: int, n_pairs: int) -> None:
    if n_pairs > MAX_PAIRS or n_tensors > MAX_TENSORS:
        raise source.error(
            f"claims {n_pairs} metadata entries and {n_tensors} tensors, more than any model has; it is damaged",
            offset=8,
        )
    if n_pairs * _SMALLEST_PAIR_BYTES + n_tensors * _SMALLEST_TENSOR_BYTES > source.remaining_bytes:
        raise source.error(
            f"claims {n_pairs} metadata entries and {n_tensors} tensors, more than its {source.size_bytes} bytes "
            "can hold; it is damaged or incomplete", offset=8,
        )  # fmt: skip


def _alignment(source: ByteSource, metadata: Mapping[str, MetadataValue]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment <= 0 or alignment & (alignment - 1):
        raise source.error(f"has the alignment {clean(str(alignment))}, which is not a power of 2; it is damaged")
    return alignment
