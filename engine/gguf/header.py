"""Parses the header of one GGUF file: metadata and the table of tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import Struct
from typing import Any

from engine.gguf.byte_source import ByteSource
from engine.gguf.foreign_files import describe_foreign_file
from engine.gguf.model_file import LazyArray, MetadataValue, TensorInfo
from engine.gguf.quoting import quote
from engine.gguf.tensor_types import TENSOR_TYPES, TensorType
from engine.units import MIB

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_TENSOR_NAME_BYTES = 63  # GGML_MAX_NAME without its final zero
MAX_KEY_BYTES = 65_535  # GGUF specification
INT64_MAX = (1 << 63) - 1

# Ours, far above any model known, so that a damaged file costs neither minutes nor memory.
MAX_PAIRS = 65_536
MAX_TENSORS = 131_072
MAX_STRINGS = 16 * MIB
MAX_KEPT_BYTES = 16 * MIB
MAX_KEPT_TEXT_BYTES = 1 * MIB
MAX_KEPT_ELEMENTS = 4096
"""Longer arrays of numbers (scores and types of a vocabulary) are stepped over."""

_U32, _U64, _COUNTS = Struct("<I"), Struct("<Q"), Struct("<QQ")
_ARRAY_HEAD = Struct("<IQ")
_TYPE_AND_OFFSET = Struct("<IQ")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: Struct("<B"), 1: Struct("<b"), 2: Struct("<H"), 3: Struct("<h"), 4: Struct("<I"), 5: Struct("<i"),
    6: Struct("<f"), 7: Struct("<B"), 10: Struct("<Q"), 11: Struct("<q"), 12: Struct("<d"),
}  # fmt: skip
_SMALLEST_PAIR_BYTES = 8 + 1 + 4 + 1
_SMALLEST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(slots=True)
class FileHeader:
    """What one file says. `arrays` are those that were stepped over, `tensors` have offsets from the file's start."""

    version: int
    metadata: dict[str, MetadataValue] = field(default_factory=dict)
    arrays: dict[str, LazyArray] = field(default_factory=dict)
    tensors: list[TensorInfo] = field(default_factory=list)


def read_header(source: ByteSource, *, file_index: int = 0) -> FileHeader:
    """Parse the header at the start of `source`; tensors get `file_index`.

    Raises:
        ModelFileError: when the bytes are no GGUF header that llama.cpp would read.
    """
    header = FileHeader(_read_version(source))
    n_tensors, n_pairs = source.take(_COUNTS, "its header")
    _check_counts(source, n_tensors, n_pairs)
    _PairReader(source, header, file_index).read(n_pairs)
    alignment = _alignment(source, header)
    _read_tensors(source, header, n_tensors, alignment, file_index)
    return header


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
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *VERSIONS):
        raise source.error("is a big-endian GGUF file, which this machine cannot load; get the little-endian one")
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


def _read_name(source: ByteSource, max_bytes: int, what: str) -> str:
    start = source.position
    (length,) = source.take(_U64, what)
    if not 0 < length <= max_bytes:
        raise source.error(f"has {what} of {length} bytes, 1 to {max_bytes} are possible; it is damaged", offset=start)
    try:
        return source.take_bytes(length, what).decode("utf-8")
    except UnicodeDecodeError:
        raise source.error(f"has {what} that is not UTF-8 text; it is damaged", offset=start) from None


class _PairReader:
    """Reads metadata entries, with budgets for what one file may make us keep or step over."""

    def __init__(self, source: ByteSource, header: FileHeader, file_index: int) -> None:
        self._source = source
        self._header = header
        self._file_index = file_index
        self._kept_bytes = 0
        self._n_strings = 0

    def read(self, n_pairs: int) -> None:
        for _ in range(n_pairs):
            start = self._source.position
            key = _read_name(self._source, MAX_KEY_BYTES, "a metadata key")
            self._keep(len(key))
            if key in self._header.metadata:
                raise self._source.error(f"has the metadata key {quote(key)} twice; it is damaged", offset=start)
            self._header.metadata[key] = self._value(key)

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
            self._n_strings += count
            if self._n_strings > MAX_STRINGS:
                raise source.error(
                    f"claims {count} strings for {quote(key)}, more than any model has; it is damaged", offset=start
                )
            self._header.arrays[key] = LazyArray("string", count, self._file_index, source.position)
            source.skip_strings(count, what)
            return None
        if kind not in _SCALARS:
            raise source.error(
                f"has array elements of unknown type {kind} for {quote(key)}; it is damaged", offset=start
            )
        element = _SCALARS[kind]
        if count > MAX_KEPT_ELEMENTS:
            self._header.arrays[key] = LazyArray(element.format[1:], count, self._file_index, source.position)
            source.skip(count * element.size, what)
            return None
        self._keep(count * element.size)
        values = Struct(f"<{count}{element.format[1:]}")
        return tuple(_as_value(kind, value) for value in source.take(values, what))


def _as_value(kind: int, value: int | float) -> int | float | bool:
    return value != 0 if kind == _BOOL else value


def _alignment(source: ByteSource, header: FileHeader) -> int:
    alignment = header.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise source.error(f"has the alignment {alignment}, which is not a power of 2; it is damaged")
    return alignment


def _read_tensors(source: ByteSource, header: FileHeader, n_tensors: int, alignment: int, file_index: int) -> None:
    rows: list[tuple[str, tuple[int, ...], TensorType, int, int, int]] = []
    names: set[str] = set()
    for _ in range(n_tensors):
        start = source.position
        name = _read_name(source, MAX_TENSOR_NAME_BYTES, "a tensor name")
        if name in names:
            raise source.error(f"has the tensor {quote(name)} twice; it is damaged", offset=start)
        names.add(name)
        shape = _read_shape(source, name)
        type_number, relative_offset = source.take(_TYPE_AND_OFFSET, f"the tensor {quote(name)}")
        kind = TENSOR_TYPES.get(type_number)
        if kind is None:
            raise source.error(
                f"has the tensor {quote(name)} of unknown type {type_number}; it is damaged or newer than this program",
                offset=start,
            )
        rows.append((name, shape, kind, _tensor_bytes(source, name, shape, kind, start), relative_offset, start))
    data_start = _aligned(source.position, alignment)
    expected = 0
    for name, shape, kind, size_bytes, relative_offset, start in rows:
        if relative_offset != expected:  # llama.cpp insists on it too; it rules out overlap and bad alignment
            raise source.error(
                f"has the tensor {quote(name)} at byte {relative_offset} of its data, not {expected}; it is damaged",
                offset=start,
            )
        end = data_start + expected + size_bytes
        if end > source.size_bytes:
            raise source.error(
                f"is incomplete: the tensor {quote(name)} ends at byte {end}, the file at {source.size_bytes}; "
                "download it again",
                offset=start,
            )
        header.tensors.append(TensorInfo(name, shape, kind.name, size_bytes, file_index, data_start + expected))
        expected = _aligned(expected + size_bytes, alignment)


def _read_shape(source: ByteSource, name: str) -> tuple[int, ...]:
    start = source.position
    (n_dimensions,) = source.take(_U32, f"the tensor {quote(name)}")
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        raise source.error(
            f"has the tensor {quote(name)} with {n_dimensions} dimensions; 1 to 4 are possible, so it is damaged",
            offset=start,
        )
    shape: tuple[Any, ...] = source.take(Struct(f"<{n_dimensions}Q"), f"the tensor {quote(name)}")
    if 0 in shape:
        raise source.error(f"has the tensor {quote(name)} without elements; it is damaged", offset=start)
    return shape


def _tensor_bytes(source: ByteSource, name: str, shape: tuple[int, ...], kind: TensorType, start: int) -> int:
    n_elements = 1
    for extent in shape:
        n_elements *= extent
    size_bytes = n_elements // kind.block_elements * kind.block_bytes
    if n_elements > INT64_MAX or size_bytes > INT64_MAX:
        raise source.error(
            f"has the tensor {quote(name)} with an impossible shape {shape}; it is damaged", offset=start
        )
    if shape[0] % kind.block_elements:
        raise source.error(
            f'has the tensor {quote(name)} of type {kind.name} with rows of {shape[0]} elements, not a multiple of '
            f"{kind.block_elements}; it is damaged", offset=start,
        )  # fmt: skip
    return size_bytes


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
