"""GGUF headers read completely, and with arrays skipped."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from struct import pack

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.errors import ModelFileError
from engine.base.units import MIB
from engine.model.gguf.byte_source import RangedSource
from engine.model.gguf.header import FileHeader, read_header, skim_header
from engine.model.gguf.reader import read_model
from engine.model.gguf.tensor_table import TENSOR_TYPES
from tests.support.gguf_bytes import U64, GgufBytes, Tensor, number_array, number_value, text, text_array, text_value
from tests.support.headers import HEADER_SIZES, write_real_header
from tests.support.models import write_header_only, write_tiny_llama, write_tiny_moe
from tests.support.string_arrays import read_string_array


@pytest.mark.parametrize("version", [2, 3])
def test_small_file(tmp_path: Path, version: int) -> None:
    model = read_model(GgufBytes(version=pack("<I", version)).write(tmp_path / "small.gguf"))
    assert (model.architecture, model.version, model.n_layers, model.n_vocab) == ("llama", version, 2, 3)
    assert model.name == "small"
    assert [tensor.name for tensor in model.global_tensors] == ["token_embd.weight"]
    assert model.size_bytes == (tmp_path / "small.gguf").stat().st_size


@pytest.mark.parametrize("name", sorted(HEADER_SIZES))
def test_real_headers_agree_with_the_reference_reader(tmp_path: Path, name: str) -> None:
    path = write_real_header(tmp_path, name)
    model = read_model(path)
    reference = gguf.GGUFReader(path)
    rows = {tensor.name: tensor for tensor in model.tensors}
    assert list(rows) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        row = rows[tensor.name]
        assert row.shape == tuple(tensor.shape.tolist())
        assert (row.type_name, row.size_bytes) == (tensor.tensor_type.name, tensor.n_bytes)
        assert row.offset == tensor.data_offset
    tokens = reference.fields["tokenizer.ggml.tokens"]
    assert list(read_string_array(model, "tokenizer.ggml.tokens")) == tokens.contents()
    assert model.n_vocab == len(tokens.data)
    for key, value in model.metadata.items():
        if value is not None:
            expected = reference.fields[key].contents()
            assert value == (tuple(expected) if isinstance(expected, list) else expected)


def test_large_model_without_its_weights(tmp_path: Path) -> None:
    model = read_model(write_header_only(tmp_path / "large.gguf", n_layers=126, n_vocab=300))
    assert model.n_layers == 126
    assert len({block.total_bytes for block in model.blocks}) == 1
    assert sum(block.total_bytes for block in model.blocks) > 200 * 1024**3
    assert model.hyper_parameter("embedding_length") == 16384


def test_memory_does_not_grow_with_the_vocabulary(tmp_path: Path) -> None:
    path = write_header_only(tmp_path / "wide.gguf", n_layers=1, n_embd=256, n_head=4, n_head_kv=4, n_vocab=60_000)
    read_model(path)
    tracemalloc.start()
    try:
        model = read_model(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert model.n_vocab == 60_000
    assert peak_bytes < 3 * MIB


def test_parts_of_blocks(tmp_path: Path) -> None:
    dense = read_model(write_tiny_llama(tmp_path / "dense.gguf")).blocks[0]
    assert dense.ffn_bytes == 3 * 64 * 128 * 2 + 64 * 4
    assert dense.attention_bytes == (64 * 64 * 2 + 32 * 64 * 2) * 2 + 64 * 4
    assert (dense.expert_bytes, dense.other_bytes) == (0, 0)
    sparse = read_model(write_tiny_moe(tmp_path / "sparse.gguf")).blocks[0]
    assert sparse.expert_bytes == 4 * 3 * 64 * 64 * 2
    assert sparse.ffn_bytes == 4 * 64 * 4 + 64 * 4


def test_lists_are_kept_when_they_are_short(tmp_path: Path) -> None:
    file = GgufBytes()
    file.pairs["llama.attention.head_count_kv"] = number_array([4, 0])
    file.pairs["tokenizer.ggml.scores"] = number_array([0.5] * 5000, kind=6)
    file.pairs["general.count"] = number_value(1 << 63, kind=U64)
    model = read_model(file.write(tmp_path / "lists.gguf"))
    assert model.hyper_parameter("attention.head_count_kv") == (4, 0)
    assert model.metadata["tokenizer.ggml.scores"] is None
    assert model.arrays["tokenizer.ggml.scores"].count == 5000
    assert model.metadata["general.count"] == 1 << 63


def test_an_unknown_architecture_is_no_error(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "new.gguf", n_layers=2, architecture="marvellous")
    assert read_model(path).architecture == "marvellous"


def test_layers_for_token_prediction_may_be_left_out(tmp_path: Path) -> None:
    file = GgufBytes()
    file.pairs["llama.block_count"] = number_value(3)
    path = file.write(tmp_path / "mtp.gguf")
    with pytest.raises(ModelFileError, match=r"has 3 layers according to llama\.block_count, but tensors for 2"):
        read_model(path)
    file.pairs["llama.nextn_predict_layers"] = number_value(1)
    assert read_model(file.write(path)).n_layers == 3


def test_layers_that_run_several_times_are_there_once(tmp_path: Path) -> None:
    file = GgufBytes()
    file.pairs["llama.block_count"] = number_value(6)
    file.pairs["llama.hrm.layers_per_stack"] = number_value(1)
    assert read_model(file.write(tmp_path / "stacks.gguf")).n_layers == 6


def test_vocabulary_size_without_tokens(tmp_path: Path) -> None:
    file = GgufBytes()
    del file.pairs["tokenizer.ggml.tokens"]
    assert read_model(file.write(tmp_path / "shape.gguf")).n_vocab == 3
    file.pairs["llama.vocab_size"] = number_value(7)
    assert read_model(file.write(tmp_path / "key.gguf")).n_vocab == 7


def test_damaged_text_for_people_is_no_error(tmp_path: Path) -> None:
    file = GgufBytes()
    file.pairs["general.name"] = text_value(b"caf\xff")
    assert read_model(file.write(tmp_path / "text.gguf")).name == "caf\ufffd"


def test_tensor_sizes_agree_with_the_reference() -> None:
    # The reference counts two 4-byte sums in Q8_1, a type that is never stored; ggml itself has two of 2 bytes.
    reference = {kind.name: (int(kind), *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items() if kind.name != "Q8_1"}
    ours = {kind.name: (number, kind.block_elements, kind.block_bytes) for number, kind in TENSOR_TYPES.items()}
    assert {name: ours[name] for name in reference} == reference


def test_tensor_sizes_in_the_file(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q4_K
    file = GgufBytes()
    file.tensors[0] = Tensor("token_embd.weight", (256, 32), kind=int(kind))
    file.tensors[1].offset = 32 * 144
    file.tensors[2].offset = 32 * 144 + 128
    model = read_model(file.write(tmp_path / "quant.gguf"))
    assert model.tensors[0].size_bytes == 32 * 144
    assert model.tensors[0].type_name == "Q4_K"


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
