"""The file of the made-up demo model: small, quickly written, and replaced in one step."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.base.errors import ArgumentError
from engine.base.units import KIB, MIB
from engine.model.demo.llama_writer import CHAT_TEMPLATE, LlamaShape, byte_vocabulary, llama_tensors
from engine.model.demo.writer import DEMO_SHAPE, is_current_demo, write_demo_model
from engine.model.gguf.reader import read_model
from engine.planning.memory.inspect import inspect_document
from tests.support.models import write_tiny_llama, write_tiny_moe
from tests.support.string_arrays import read_string_array
from tests.support.vocabularies import control_ids


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "new" / "folder" / "demo.gguf"
    write_demo_model(path)
    return path


def test_what_the_demo_is(demo: Path) -> None:
    document = inspect_document(read_model(demo))
    assert (document.architecture, document.file_type, document.n_layer) == ("llama", "F16", 16)
    assert document.n_ctx_train == 131072
    assert document.size_bytes < 25 * MIB
    assert document.kv_bytes_per_token == 16 * KIB
    # five layers outgrow a worker of 256 MiB by their context alone
    assert 5 * DEMO_SHAPE.n_ctx_train * KIB > 256 * MIB
    assert read_model(demo).metadata["tokenizer.chat_template"] == CHAT_TEMPLATE


def test_every_byte_has_a_token(demo: Path) -> None:
    tokens = list(read_string_array(read_model(demo), "tokenizer.ggml.tokens"))
    assert [f"<0x{value:02X}>" for value in range(256)] == tokens[3:259]
    assert len(set(tokens)) == len(tokens)


def test_the_same_bytes_each_time(demo: Path, tmp_path: Path) -> None:
    write_demo_model(tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == demo.read_bytes()


def test_letters_follow_letters_of_the_sample(demo: Path) -> None:
    reader = gguf.GGUFReader(demo)
    output = next(tensor for tensor in reader.tensors if tensor.name == "output.weight").data.astype(np.float32)
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight").data.astype(np.float32)
    logits = output[:, :64] @ embedding[:, :64].T
    vocabulary = byte_vocabulary()
    for token in range(len(vocabulary)):
        most_likely = int(logits[:, token].argmax())
        assert most_likely not in control_ids(vocabulary)
    stop = vocabulary.id_of("<0x2E>")
    assert logits[vocabulary.id_of("<|end|>"), stop] > logits[vocabulary.id_of("<0x75>"), stop]


def test_current_demo_is_recognised(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_current_demo(demo)
    assert not is_current_demo(tmp_path / "missing.gguf")
    assert not is_current_demo(write_tiny_llama(tmp_path / "other.gguf", n_layers=1))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(demo.read_bytes()[:-1000])
    assert not is_current_demo(cut)
    monkeypatch.setattr("engine.model.demo.writer.DEMO_VERSION", 99)
    assert not is_current_demo(demo)


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "demo.gguf"
    path.write_bytes(b"something else")
    write_demo_model(path)
    assert is_current_demo(path)
    assert list(tmp_path.iterdir()) == [path]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="is a folder; name the file"):
        write_demo_model(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ArgumentError, match="part of the path is a file"):
        write_demo_model(tmp_path / "file" / "demo.gguf")
    with pytest.raises(ArgumentError, match="not a valid file name"):
        write_demo_model(tmp_path / "nul\0.gguf")
    with pytest.raises(ArgumentError, match="name too long"):
        write_demo_model(tmp_path / ("x" * 300 + ".gguf"))


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "demo.gguf"
    path.write_bytes(b"the old one")

    def fill_disk(unfinished: Path, *_: object, **__: object) -> None:
        unfinished.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.model.demo.writer.write_llama", fill_disk)
    with pytest.raises(ArgumentError, match="No space left on device; choose another place"):
        write_demo_model(path)
    assert path.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_vocabulary_sizes() -> None:
    assert len(byte_vocabulary()) == 264
    assert len(byte_vocabulary(1000)) == len(set(byte_vocabulary(1000).tokens)) == 1000
    with pytest.raises(ValueError, match="at least 264 tokens, 100 were asked for"):
        byte_vocabulary(100)


def test_models_for_tests(tmp_path: Path) -> None:
    quantised = read_model(write_tiny_llama(tmp_path / "q8.gguf", n_layers=2, file_type="Q8_0", n_vocab=500))
    assert (quantised.n_vocab, quantised.blocks[0].tensors[1].type_name) == (500, "Q8_0")
    factors = read_model(write_tiny_llama(tmp_path / "rope.gguf", n_layers=2, rope_factors=True, tied=True))
    assert {tensor.name for tensor in factors.global_tensors} == {
        "token_embd.weight", "rope_freqs.weight", "output_norm.weight",
    }  # fmt: skip
    extra = write_tiny_moe(tmp_path / "moe.gguf", extra_metadata={"general.tags": ["a", "b"], "llama.odd": 1.5})
    model = read_model(extra)
    assert list(read_string_array(model, "general.tags")) == ["a", "b"]
    assert model.hyper_parameter("odd") == 1.5
    assert model.hyper_parameter("expert_used_count") == 2


def test_tensor_table() -> None:
    shape = LlamaShape(n_layers=2, n_embd=64, n_head=4, n_head_kv=2, n_ff=96, n_ctx_train=128)
    table = dict(llama_tensors(shape, 300))
    assert table["blk.1.attn_k.weight"] == (32, 64)
    assert table["blk.0.ffn_down.weight"] == (64, 96)
    assert table["output.weight"] == (300, 64)
