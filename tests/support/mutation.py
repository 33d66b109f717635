"""Random changes of GGUF headers and JSON documents that keep their structure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from struct import Struct, pack, unpack_from
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

ODD_NUMBERS = (0, 1, 2, 3, 5, 7, 31, 63, 64, 127, 128, 255, 256, 4096, 65535, 1 << 20, 1 << 24, (1 << 31) - 1, 1 << 31,
               (1 << 32) - 1)  # fmt: skip
ODD_TEXTS = ("", "a", "llama", "\x1b[31m", "é" * 40, "x" * 3000, "blk.0", "-1", "1e9", "\u202e", "\x00")
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_FIXED = Struct("<4sIQQ")
_ALIGNMENT = 32


@dataclass
class Pair:
    """A key of the metadata, with its type and value as bytes of the file."""

    key: bytes
    value: bytes


@dataclass
class Row:
    """A row of the tensor table."""

    name: bytes
    shape: tuple[int, ...]
    kind: int
    offset: int = 0
    """Set by `Header.encode`. A negative one is written as its absolute value instead, which is a wrong offset."""


class Header:
    """A parsed GGUF header that can be changed and encoded again."""

    def __init__(self, data: bytes) -> None:
        _, self.version, n_tensors, n_pairs = _FIXED.unpack_from(data)
        place = _FIXED.size
        self.pairs: list[Pair] = []
        for _ in range(n_pairs):
            key, place = _text(data, place)
            end = _value_end(data, place)
            self.pairs.append(Pair(key, data[place:end]))
            place = end
        self.rows: list[Row] = []
        for _ in range(n_tensors):
            name, place = _text(data, place)
            (n_dims,) = unpack_from("<I", data, place)
            *shape, kind, _ = unpack_from(f"<{n_dims}QIQ", data, place + 4)
            self.rows.append(Row(name, tuple(shape), kind))
            place += 4 + 8 * n_dims + 12
        self.more_pairs = self.more_rows = 0
        self.size_bytes = 0
        """Size of all weights; set by `encode`."""

    def encode(self) -> bytes:
        """Return the bytes of the header, with the right offsets except for rows with a negative one."""
        place = 0
        for row in self.rows:
            row.offset = place if row.offset >= 0 else -row.offset
            place += -(-_size_bytes(row) // _ALIGNMENT) * _ALIGNMENT
        self.size_bytes = place
        parts = [_FIXED.pack(b"GGUF", self.version, len(self.rows) + self.more_rows, len(self.pairs) + self.more_pairs)]
        parts += [pack("<Q", len(pair.key)) + pair.key + pair.value for pair in self.pairs]
        for row in self.rows:
            shape = pack(f"<I{len(row.shape)}Q", len(row.shape), *row.shape)
            parts.append(pack("<Q", len(row.name)) + row.name + shape + pack("<IQ", row.kind, row.offset % (1 << 64)))
        return b"".join(parts)


def change_values(path: Path, values: Mapping[str, bytes]) -> Path:
    """Replace values of a model's metadata (type and value as bytes) and keep its weights; return `path`."""
    data = path.read_bytes()
    header = Header(data)
    weights = data[_padded(len(header.encode())) :]
    for pair in header.pairs:
        pair.value = values.get(pair.key.decode(), pair.value)
    changed = header.encode()
    path.write_bytes(changed.ljust(_padded(len(changed)), b"\0") + weights)
    return path


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def mutate_header(header: Header, numbers: random.Random) -> str:
    """Make one random change to the header; return a description of it."""
    change = numbers.choice(_HEADER_CHANGES)
    return f"{change.__name__.strip('_')} {change(header, numbers)}"


def _other_number(header: Header, numbers: random.Random) -> str:
    """Replace a number of the metadata. Most changes are of this kind, since the memory arithmetic depends on them."""
    pair = numbers.choice([pair for pair in header.pairs if pair.value[0] in _FORMATS] or header.pairs)
    kind = pair.value[0]
    if kind in _FORMATS:
        number = numbers.choice(ODD_NUMBERS)
        pair.value = pack("<I", kind) + _packed(kind, number)
        return f"{pair.key!r} {number}"
    return "nothing"


def _other_type(header: Header, numbers: random.Random) -> str:
    pair = numbers.choice(header.pairs)
    kind = numbers.choice((*_FORMATS, _STRING, _ARRAY))
    if kind == _STRING:
        text = numbers.choice(ODD_TEXTS).encode()
        pair.value = pack("<IQ", kind, len(text)) + text
    elif kind == _ARRAY:
        count, of = numbers.choice((0, 1, 3, 200)), numbers.choice(tuple(_FORMATS))
        pair.value = pack("<IIQ", kind, of, count) + b"".join(
            _packed(of, numbers.choice(ODD_NUMBERS)) for _ in range(count)
        )
    else:
        pair.value = pack("<I", kind) + _packed(kind, numbers.choice(ODD_NUMBERS))
    return f"{pair.key!r} {kind}"


def _missing_key(header: Header, numbers: random.Random) -> str:
    return repr(header.pairs.pop(numbers.randrange(len(header.pairs))).key)


def _doubled_key(header: Header, numbers: random.Random) -> str:
    header.pairs.append(replace(numbers.choice(header.pairs)))
    return repr(header.pairs[-1].key)


def _missing_kind(header: Header, numbers: random.Random) -> str:
    """Remove all tensors of one kind, in all layers."""
    stem = _stem(numbers.choice(header.rows).name)
    header.rows = [row for row in header.rows if _stem(row.name) != stem]
    return repr(stem)


def _missing_tensor(header: Header, numbers: random.Random) -> str:
    return repr(header.rows.pop(numbers.randrange(len(header.rows))).name)


def _doubled_tensor(header: Header, numbers: random.Random) -> str:
    header.rows.append(replace(numbers.choice(header.rows)))
    return repr(header.rows[-1].name)


def _other_tensor(header: Header, numbers: random.Random) -> str:
    row = numbers.choice(header.rows)
    match numbers.randrange(4):
        case 0:
            row.shape = tuple(numbers.choice((*row.shape, *ODD_NUMBERS)) for _ in range(numbers.randrange(1, 6)))
        case 1:
            row.kind = numbers.randrange(45)
        case 2:
            row.offset = -numbers.choice((1, 32, 1 << 40, (1 << 64) - 32))
        case _:
            row.name = numbers.choice(
                (b"", b"blk.0.\xff", b"x" * 200, b"output.weight", numbers.choice(header.rows).name)
            )
    return repr(row)[:200]


def _other_shapes(header: Header, numbers: random.Random) -> str:
    """Change one extent of all tensors of one kind, as another hyper-parameter would."""
    stem, extent = _stem(numbers.choice(header.rows).name), numbers.choice(ODD_NUMBERS[1:])
    for row in header.rows:
        if _stem(row.name) == stem and row.shape:
            row.shape = (*row.shape[:-1], extent)
    return f"{stem!r} {extent}"


def _other_count(header: Header, numbers: random.Random) -> str:
    header.more_pairs, header.more_rows = numbers.randrange(-2, 3), numbers.randrange(-2, 3)
    return f"{header.more_pairs} {header.more_rows}"


_HEADER_CHANGES: tuple[Callable[[Header, random.Random], str], ...] = (
    *[_other_number] * 6, _other_type, _missing_key, _doubled_key, *[_missing_kind] * 3, _missing_tensor,
    _doubled_tensor, _other_tensor, *[_other_shapes] * 2, _other_count,
)  # fmt: skip


def _size_bytes(row: Row) -> int:
    """Return the size of a tensor in bytes; 0 if its type is unknown."""
    try:
        per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(row.kind)]
    except (KeyError, ValueError):
        return 0
    return math.prod(row.shape) // per_block * block_bytes


def _stem(name: bytes) -> bytes:
    return name.split(b".", 2)[-1] if name.startswith(b"blk.") else name


def _packed(kind: int, number: int) -> bytes:
    form = _FORMATS[kind]
    if form in "fd":
        return pack(f"<{form}", float(number))
    bits = 8 * Struct(f"<{form}").size
    number &= (1 << bits) - 1
    return pack(f"<{form}", number - (1 << bits) if form.islower() and number >> (bits - 1) else number)


def _text(data: bytes, place: int) -> tuple[bytes, int]:
    (length,) = unpack_from("<Q", data, place)
    return data[place + 8 : place + 8 + length], place + 8 + length


def _value_end(data: bytes, place: int) -> int:
    (kind,) = unpack_from("<I", data, place)
    place += 4
    if kind == _STRING:
        return _text(data, place)[1]
    if kind != _ARRAY:
        return place + Struct(f"<{_FORMATS[kind]}").size
    of, count = unpack_from("<IQ", data, place)
    place += 12
    if of != _STRING:
        return int(place + count * Struct(f"<{_FORMATS[of]}").size)
    for _ in range(count):
        _, place = _text(data, place)
    return place


def mutate_json(document: Any, numbers: random.Random) -> Any:
    """Return a copy of `document` with one value, key or list changed at a random place."""
    if isinstance(document, dict) and document and numbers.random() < 0.85:
        key = numbers.choice(list(document))
        changed = dict(document)
        match numbers.randrange(6):
            case 0:
                del changed[key]
            case 1:
                changed[numbers.choice((*ODD_TEXTS, *document))] = changed.pop(key)
            case _:
                changed[key] = mutate_json(document[key], numbers)
        return changed
    if isinstance(document, list) and document and numbers.random() < 0.85:
        index = numbers.randrange(len(document))
        match numbers.randrange(5):
            case 0:
                return document[:index] + document[index + 1 :]
            case 1:
                return [*document, document[index]] * numbers.choice((1, 40))
            case _:
                return [*document[:index], mutate_json(document[index], numbers), *document[index + 1 :]]
    return numbers.choice(
        (None, True, False, 0, -1, 0.5, 1e308, 1 << 70, [], {}, [[]], "", *ODD_TEXTS, *ODD_NUMBERS, [1] * 300, "9GiB",
         {"a": {"b": {}}}, "\udc80")
    )  # fmt: skip
