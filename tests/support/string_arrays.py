"""Reads the string arrays that our GGUF reader skips, such as the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

from engine.model.gguf.byte_source import open_source
from engine.model.gguf.model_file import ModelFile

_LENGTH = Struct("<Q")


def read_string_array(model: ModelFile, key: str) -> Iterator[str]:
    """Yield the strings of the array under `key`, one by one."""
    array = model.arrays[key]
    assert array.element == "string", key
    with open_source(model.paths[array.file_index]) as source:
        source.skip(array.offset, key)
        for _ in range(array.count):
            (length,) = source.take(_LENGTH, key)
            yield source.take_bytes(length, key).decode("utf-8", errors="replace")
