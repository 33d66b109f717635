"""Any bytes give the GGUF reader a model or a `ModelFileError`."""

from __future__ import annotations

from pathlib import Path
from struct import pack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import ModelFileError
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.memory.inspect import inspect_document, inspect_text
from tests.support.gguf_bytes import GgufBytes, Tensor, number_value, text_array, text_value
from tests.support.headers import HEADER_SIZES, header_bytes, write_with_hole
from tests.support.selection import examples
from tests.support.string_arrays import read_string_array

_REAL = {name: header_bytes(name) for name in sorted(HEADER_SIZES)}
_ODD_NUMBERS = (0, 1, 2, 3, 4, 31, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any") / "any.gguf"


def _read(path: Path) -> ModelFile | ModelFileError:
    try:
        return read_model(path)
    except ModelFileError as error:
        return error


def _check(path: Path) -> None:
    size_bytes = path.stat().st_size
    model = _read(path)
    if isinstance(model, ModelFileError):
        assert model.reason
        assert model.offset is None or 0 <= model.offset <= size_bytes
        return
    assert sum(len(block.tensors) for block in model.blocks) + len(model.global_tensors) == len(model.tensors)
    for tensor in model.tensors:
        assert 0 < tensor.offset <= tensor.offset + tensor.size_bytes <= size_bytes
    for block in model.blocks:
        assert block.total_bytes == sum(tensor.size_bytes for tensor in block.tensors)
    for key, array in model.arrays.items():
        if array.element == "string":
            assert sum(1 for _ in read_string_array(model, key)) == array.count
    assert inspect_text(inspect_document(model))


@settings(max_examples=examples(100), deadline=None)
@given(content=st.binary(max_size=400))
def test_any_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _check(path)


@settings(max_examples=examples(100), deadline=None)
@given(
    version=st.sampled_from([2, 3]),
    n_tensors=st.integers(0, 3),
    n_pairs=st.integers(0, 3),
    content=st.binary(max_size=400),
)
def test_any_bytes_behind_the_magic(path: Path, version: int, n_tensors: int, n_pairs: int, content: bytes) -> None:
    path.write_bytes(b"GGUF" + pack("<IQQ", version, n_tensors, n_pairs) + content)
    _check(path)


@settings(max_examples=examples(250), deadline=None)
@given(choices=st.data())
def test_real_headers_with_damage(path: Path, choices: st.DataObject) -> None:
    name = choices.draw(st.sampled_from(list(_REAL)))
    header = bytearray(_REAL[name])
    for _ in range(choices.draw(st.integers(1, 3))):
        # The first 2000 bytes hold the hyper-parameters, the last ones the tensor table; between lie mostly merges.
        at = choices.draw(st.integers(0, 2000) | st.integers(len(header) - 3000, len(header) - 9))
        kind = choices.draw(st.sampled_from(["bytes", "u32", "u64", "insert", "delete", "cut"]))
        if kind == "bytes":
            header[at : at + 2] = choices.draw(st.binary(min_size=2, max_size=2))
        elif kind == "u32":
            header[at : at + 4] = pack("<I", choices.draw(st.sampled_from(_ODD_NUMBERS)) & 0xFFFFFFFF)
        elif kind == "u64":
            header[at : at + 8] = pack("<Q", choices.draw(st.sampled_from(_ODD_NUMBERS)))
        elif kind == "insert":
            header[at:at] = choices.draw(st.binary(min_size=1, max_size=8))
        elif kind == "delete":
            del header[at : at + choices.draw(st.integers(1, 8))]
        else:
            del header[at:]
            break
    write_with_hole(path, bytes(header), HEADER_SIZES[name])
    _check(path)


_VALUES = st.one_of(
    st.integers(0, (1 << 32) - 1).map(number_value),
    st.text(max_size=12).map(text_value),
    st.lists(st.binary(max_size=6), max_size=6).map(text_array),
)
_KEYS = st.sampled_from([
    "general.architecture", "general.alignment", "general.name", "general.type", "general.file_type", "split.count",
    "split.no", "llama.block_count", "llama.vocab_size", "llama.nextn_predict_layers", "llama.attention.head_count",
    "llama.attention.key_length", "llama.embedding_length", "llama.context_length", "tokenizer.ggml.tokens",
])  # fmt: skip
_NAMES = st.sampled_from(
    ["token_embd.weight", "blk.0.attn_k.weight", "blk.1.ffn_up_exps.weight", "blk.99999999.x", "x"]
)
_TENSORS = st.builds(
    Tensor, _NAMES, st.lists(st.integers(0, 1 << 20), min_size=1, max_size=4).map(tuple), kind=st.integers(0, 45)
)


@settings(max_examples=examples(150), deadline=None)
@given(pairs=st.dictionaries(_KEYS, _VALUES, max_size=6), tensors=st.lists(_TENSORS, max_size=3))
def test_well_formed_nonsense(path: Path, pairs: dict[str | bytes, bytes], tensors: list[Tensor]) -> None:
    file = GgufBytes()
    file.pairs.update(pairs)
    file.tensors += tensors
    write_with_hole(path, file.header(), 1 << 20)
    _check(path)
