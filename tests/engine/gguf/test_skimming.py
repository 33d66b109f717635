"""A header that is skimmed says what one that is read says, whatever lures a vocabulary holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ModelFileError
from engine.gguf.byte_source import RangedSource
from engine.gguf.header import FileHeader, read_header, skim_header
from tests.support.gguf_bytes import GgufBytes, number_array, number_value, text, text_array, text_value

_N_TOKENS = 5000
_WINDOW_BYTES = 4096
_LURE = text("tokenizer.ggml.scores") + number_value(1)
"""A token that looks like the next key with its value."""


def file_with(tokens: list[str | bytes], behind: dict[str | bytes, bytes]) -> bytes:
    pairs = {
        "general.architecture": text_value("llama"),
        "llama.block_count": number_value(2),
        "tokenizer.ggml.tokens": text_array(tokens),
        **behind,
    }
    return GgufBytes(pairs=pairs).build()


def header_of(data: bytes, read: object) -> FileHeader:
    assert callable(read)
    n_read = 0

    def read_range(first: int, _needed: int, wanted: int) -> bytes:
        nonlocal n_read
        n_read += wanted - first
        return data[first:wanted]

    found = read(RangedSource(Path("m.gguf"), len(data), read_range, window_bytes=_WINDOW_BYTES))
    assert isinstance(found, FileHeader)
    return found


_BEHIND: dict[str | bytes, bytes] = {
    "tokenizer.ggml.merges": text_array([f"a b{number}" for number in range(_N_TOKENS)]),
    "tokenizer.ggml.token_type": number_array(range(_N_TOKENS)),
    "tokenizer.chat_template": text_value("{{ messages }}"),
    "general.quantization_version": number_value(2),
}


@given(
    tokens=st.lists(st.text(max_size=20), max_size=20),
    lure_at=st.integers(0, _N_TOKENS - 1),
    behind=st.permutations(list(_BEHIND)),
)
def test_skimmed_is_as_read(tokens: list[str], lure_at: int, behind: list[str]) -> None:
    vocabulary: list[str | bytes] = [*tokens, *(f"t{number}" for number in range(_N_TOKENS))]
    for each in (vocabulary, [*vocabulary[:lure_at], _LURE, *vocabulary[lure_at:]]):
        data = file_with(each, {key: _BEHIND[key] for key in behind})
        assert header_of(data, skim_header) == header_of(data, read_header)


@pytest.mark.parametrize("cut", [1, 200, 40_000, 150_000])
def test_what_is_incomplete_is_refused_as_when_read(cut: int) -> None:
    whole = file_with([f"token {number}" for number in range(_N_TOKENS)], dict(_BEHIND))
    with pytest.raises(ModelFileError) as read:
        header_of(whole[:-cut], read_header)
    with pytest.raises(ModelFileError) as skimmed:
        header_of(whole[:-cut], skim_header)
    assert str(skimmed.value) == str(read.value)
