"""Parses the header of one GGUF file: metadata and the table of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct

from engine.errors import ModelFileError
from engine.gguf.byte_source import ByteSource
from engine.gguf.foreign_files import describe_foreign_file
from engine.gguf.metadata import MetadataReader
from engine.gguf.model_file import LazyArray, MetadataValue, TensorInfo
from engine.gguf.quoting import clean
from engine.gguf.tensor_table import read_tensors

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Ours, far above any model known, so that a damaged file costs neither minutes nor memory.
MAX_PAIRS = 65_536
MAX_TENSORS = 131_072

_U32, _COUNTS = Struct("<I"), Struct("<QQ")
_SMALLEST_PAIR_BYTES = 8 + 1 + 4 + 1
_SMALLEST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What one file says. `arrays` are those that were stepped over, `tensors` have offsets from the file's start."""

    version: int
    metadata: Mapping[str, MetadataValue]
    arrays: Mapping[str, LazyArray]
    tensors: tuple[TensorInfo, ...]


def skim_header(source: ByteSource, *, file_index: int = 0) -> FileHeader:
    """Parse the header as `read_header` does, without a look at every string of a vocabulary.

    Where that ends is guessed from what stands behind it, and the guess is taken only where all that follows is sound:
    a file that is damaged in its vocabulary alone is not found out. For lists; what is opened is read.

    Raises:
        ModelFileError: as `read_header`.
    """
    try:
        return _read(source, file_index, guess=True)
    except ModelFileError:
        source.position = 0
        return _read(source, file_index, guess=False)


def read_header(source: ByteSource, *, file_index: int = 0) -> FileHeader:
    """Parse the header at the start of `source`; tensors get `file_index`.

    Raises:
        ModelFileError: when the bytes are no GGUF header that llama.cpp would read.
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


def _alignment(source: ByteSource, metadata: Mapping[str, MetadataValue]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment <= 0 or alignment & (alignment - 1):
        raise source.error(f"has the alignment {clean(str(alignment))}, which is not a power of 2; it is damaged")
    return alignment
