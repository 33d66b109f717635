"""Parses the metadata of a GGUF file: a value for each key, long arrays stepped over."""

from __future__ import annotations

from struct import Struct

from engine.gguf.byte_source import ByteSource
from engine.gguf.model_file import LazyArray, MetadataValue
from engine.gguf.quoting import quote
from engine.units import MIB

MAX_KEY_BYTES = 65_535  # GGUF specification

# Ours, far above any model known, so that a damaged file costs neither minutes nor memory.
MAX_STRINGS = 16 * MIB
MAX_KEPT_BYTES = 16 * MIB
MAX_KEPT_TEXT_BYTES = 1 * MIB
MAX_KEPT_ELEMENTS = 4096
"""Longer arrays of numbers (scores and types of a vocabulary) are stepped over."""

_NEXT_KEY = bytes(7) + b"tokenizer."
"""How the key behind a vocabulary begins, with the upper bytes of its length."""
_LENGTH_BYTES = 8
_MOST_TEXT_BYTES = 32
"""Of a string of a vocabulary on average, where its end is guessed; most have 6 to 10."""

_U32, _U64, _ARRAY_HEAD = Struct("<I"), Struct("<Q"), Struct("<IQ")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: Struct("<B"), 1: Struct("<b"), 2: Struct("<H"), 3: Struct("<h"), 4: Struct("<I"), 5: Struct("<i"),
    6: Struct("<f"), 7: Struct("<B"), 10: Struct("<Q"), 11: Struct("<q"), 12: Struct("<d"),
}  # fmt: skip


class MetadataReader:
    """Reads metadata entries, with budgets for what one file may make us keep or step over.

    `arrays` are those that were stepped over, `file_index` is noted in them. `guess`: the end of a vocabulary is looked
    for by the key behind it instead of by the length of every string in it.
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
        """Read `n_pairs` entries from the source's position."""
        for _ in range(n_pairs):
            start = self._source.position
            key = self._source.take_name(MAX_KEY_BYTES, "a metadata key")
            self._keep(len(key))
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
            self._n_strings += count
            if self._n_strings > MAX_STRINGS:
                raise source.error(
                    f"claims {count} strings for {quote(key)}, more than any model has; it is damaged", offset=start
                )
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
        values = Struct(f"<{count}{element.format[1:]}")
        return tuple(_as_value(kind, value) for value in source.take(values, what))

    def _find_next_key(self, count: int) -> bool:
        """Step to where the key behind `count` strings seems to begin."""
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
