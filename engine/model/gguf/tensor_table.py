"""Tensor types of ggml, and the reader of a GGUF file's tensor table."""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Any, NamedTuple

from engine.base.texts import quote
from engine.model.gguf.byte_source import ByteSource
from engine.model.gguf.model_file import TensorInfo


class TensorType(NamedTuple):
    """A ggml type. A block of `block_elements` consecutive elements of a row takes `block_bytes`."""

    name: str
    block_elements: int
    block_bytes: int


TENSOR_TYPES: dict[int, TensorType] = {
    # enum ggml_type in ggml.h, block structs in ggml-common.h; numbers missing here were withdrawn upstream
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 36),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
    42: TensorType("Q2_0", 64, 18),
}
TYPES_BY_NAME: dict[str, TensorType] = {
    name: kind for kind in TENSOR_TYPES.values() for name in (kind.name, kind.name.lower())
}
"""Types by name, both in capitals (as in ggml and files) and in lower case (as in settings)."""


MAX_DIMENSIONS = 4
MAX_TENSOR_NAME_BYTES = 63  # GGML_MAX_NAME without its final zero
INT64_MAX = (1 << 63) - 1

_U32, _TYPE_AND_OFFSET = Struct("<I"), Struct("<IQ")
_EXTENTS = tuple(Struct(f"<{count}Q") for count in range(MAX_DIMENSIONS + 1))


class _Row(NamedTuple):
    """One row of the tensor table.

    `offset`: byte offset of the tensor from the start of the tensor data.
    `found_at`: byte offset of the row from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorType
    size_bytes: int
    offset: int
    found_at: int


def read_tensors(source: ByteSource, n_tensors: int, alignment: int, *, file_index: int) -> list[TensorInfo]:
    """Read the tensor table at the current position, and check that each tensor is inside of the file.

    `alignment`: bytes to which tensors are padded. `file_index`: number of the file among the model's files.

    Raises:
        ModelFileError: a row of the table is invalid; the message names the tensor.
    """
    rows: dict[str, _Row] = {}
    for _ in range(n_tensors):
        row = _read_row(source)
        if row.name in rows:
            raise source.error(f"has the tensor {quote(row.name)} twice; it is damaged", offset=row.found_at)
        rows[row.name] = row
    return _place(source, rows.values(), alignment, file_index)


def _read_row(source: ByteSource) -> _Row:
    start = source.position
    name = source.take_name(MAX_TENSOR_NAME_BYTES, "a tensor name")
    what = f"the tensor {quote(name)}"
    shape = _read_shape(source, name, what)
    type_number, offset = source.take(_TYPE_AND_OFFSET, what)
    kind = TENSOR_TYPES.get(type_number)
    if kind is None:
        raise source.error(
            f"has the tensor {quote(name)} of unknown type {type_number}; it is damaged or newer than this program",
            offset=start,
        )
    return _Row(name, shape, kind, _tensor_bytes(source, name, shape, kind, start), offset, start)


def _place(source: ByteSource, rows: Iterable[_Row], alignment: int, file_index: int) -> list[TensorInfo]:
    data_start = _align(source.position, alignment)
    expected = 0
    tensors = []
    for row in rows:
        if row.offset != expected:  # llama.cpp insists on it too; it rules out overlap and bad alignment
            raise source.error(
                f"has the tensor {quote(row.name)} at byte {row.offset} of its data, not {expected}; it is damaged",
                offset=row.found_at,
            )
        end = data_start + expected + row.size_bytes
        if end > source.size_bytes:
            raise source.error(
                f"is incomplete: the tensor {quote(row.name)} ends at byte {end}, the file at {source.size_bytes}; "
                "download it again",
                offset=row.found_at,
            )
        offset = data_start + expected
        tensors.append(TensorInfo(row.name, row.shape, row.kind.name, row.size_bytes, file_index, offset))
        # The next tensor begins at the padded end of this one (GGML_PAD in gguf.cpp).
        expected = _align(expected + row.size_bytes, alignment)
    return tensors


def _read_shape(source: ByteSource, name: str, what: str) -> tuple[int, ...]:
    start = source.position
    (n_dimensions,) = source.take(_U32, what)
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        raise source.error(
            f"has the tensor {quote(name)} with {n_dimensions} dimensions; 1 to 4 are possible, so it is damaged",
            offset=start,
        )
    shape: tuple[Any, ...] = source.take(_EXTENTS[n_dimensions], what)
    if 0 in shape:
        raise source.error(f"has the tensor {quote(name)} without elements; it is damaged", offset=start)
    return shape


def _tensor_bytes(source: ByteSource, name: str, shape: tuple[int, ...], kind: TensorType, start: int) -> int:
    # Python's integers do not overflow, so the product of four 64-bit extents can be checked afterwards.
    n_elements = 1
    for extent in shape:
        n_elements *= extent
    size_bytes = n_elements // kind.block_elements * kind.block_bytes
    if n_elements > INT64_MAX or size_bytes > INT64_MAX:
        raise source.error(
            f"has the tensor {quote(name)} with an impossible shape {shape}; it is damaged", offset=start
        )
    # Blocks of quantised types do not cross rows, so a row has a whole number of them.
    if shape[0] % kind.block_elements:
        raise source.error(
            f'has the tensor {quote(name)} of type {kind.name} with rows of {shape[0]} elements, not a multiple of '
            f"{kind.block_elements}; it is damaged", offset=start,
        )  # fmt: skip
    return size_bytes


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
