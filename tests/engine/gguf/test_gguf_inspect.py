"""The `inspect` document and its text."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.gguf.blocks import block_index, part_of_tensor
from engine.gguf.cache_growth import kv_bytes_per_token
from engine.gguf.file_type import file_type_name
from engine.gguf.inspect import inspect_document, inspect_text
from engine.gguf.reader import read_model
from tests.support.gguf_bytes import GgufBytes, Tensor, number_array, number_value, text_value
from tests.support.headers import write_real_header
from tests.support.models import write_header_only, write_tiny_llama

_KEYS = [
    "architecture", "name", "file_type", "n_layer", "n_ctx_train", "n_vocab", "n_parameters", "size_bytes", "parts",
    "blocks", "token_embedding_bytes", "output_bytes", "kv_bytes_per_token",
]  # fmt: skip


def test_document_has_the_keys_of_the_contract(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", n_layers=3, n_ctx_train=2048)
    document = msgspec.to_builtins(inspect_document(read_model(path)))
    assert list(document) == _KEYS
    assert list(document["blocks"][0]) == [
        "index", "total_bytes", "attention_bytes", "ffn_bytes", "expert_bytes", "other_bytes",
    ]  # fmt: skip
    per_layer = 64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128 + 2 * 64
    assert document["n_parameters"] == 3 * per_layer + 2 * 264 * 64 + 64
    assert (document["n_layer"], document["n_ctx_train"], document["file_type"]) == (3, 2048, "F16")
    assert document["token_embedding_bytes"] == 264 * 64 * 2
    assert document["output_bytes"] == 264 * 64 * 2 + 64 * 4
    assert document["kv_bytes_per_token"] == 3 * 2 * 2 * 16 * 2
    assert document["parts"] == ("tiny.gguf",)


def test_tied_output_counts_its_norm_only(tmp_path: Path) -> None:
    document = inspect_document(read_model(write_tiny_llama(tmp_path / "tied.gguf", n_layers=1, tied=True)))
    assert document.output_bytes == 64 * 4


def test_text_puts_alike_layers_on_one_line(tmp_path: Path) -> None:
    model = read_model(write_header_only(tmp_path / "large.gguf", n_layers=126, n_vocab=300))
    lines = inspect_text(inspect_document(model)).splitlines()
    assert lines[-1].startswith("  0-125    1.67 GiB each: attention")
    assert "Type             Q4_K_M" in lines
    assert "KV cache         504.0 KiB per token (f16)" in lines


@pytest.mark.parametrize(
    ("name", "growth"),
    [
        # from llama.cpp's own KV buffers; in gemma3 both layers slide but the second attends to everything
        ("llama-moe.gguf", 2048),
        ("mistral4-moe.gguf", 2304),  # latent attention: one row for K and V
        ("nemotron_h_moe-dense.gguf", 1024),  # one of three layers attends
        ("gemma3-dense.gguf", 1024),
    ],
)
def test_cache_growth_of_real_headers(tmp_path: Path, name: str, growth: int) -> None:
    assert kv_bytes_per_token(read_model(write_real_header(tmp_path, name))) == growth


def _growth(tmp_path: Path, architecture: str, **numbers: bytes) -> int | None:
    n_layers = 6
    file = GgufBytes()
    file.pairs = {
        "general.architecture": text_value(architecture),
        f"{architecture}.block_count": number_value(n_layers),
        f"{architecture}.embedding_length": number_value(64),
        f"{architecture}.attention.head_count": number_value(4),
    }
    file.pairs |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in numbers.items()}
    file.tensors = [Tensor(f"blk.{index}.attn_k.weight") for index in range(n_layers)]
    return kv_bytes_per_token(read_model(file.write(tmp_path / "growth.gguf")))


def test_cache_growth(tmp_path: Path) -> None:
    full = 2 * 4 * (16 + 16)
    assert _growth(tmp_path, "llama") == 6 * full
    assert _growth(tmp_path, "llama", attention__head_count_kv=number_array([4, 2, 0, 0, 0, 1])) == 7 * full // 4
    assert _growth(tmp_path, "llama", attention__key_length=number_value(24)) == 6 * 2 * 4 * (24 + 16)
    assert _growth(tmp_path, "llama", attention__sliding_window=number_value(128)) == 6 * full, "llama.cpp ignores it"
    assert _growth(tmp_path, "gemma2", attention__sliding_window=number_value(128)) == 3 * full
    assert _growth(tmp_path, "gemma2") == 6 * full
    window = number_value(128)
    pattern = number_array([1, 1, 0, 1, 1, 1], kind=7)
    sliding = {"attention__sliding_window": window, "attention__sliding_window_pattern": pattern}
    assert _growth(tmp_path, "gemma4", **sliding) == full
    assert _growth(tmp_path, "gemma4", attention__sliding_window=window) is None
    assert _growth(tmp_path, "llama", nextn_predict_layers=number_value(1)) == 5 * full
    assert _growth(tmp_path, "gemma4", attention__shared_kv_layers=number_value(4)) == 2 * full
    assert _growth(tmp_path, "bert") == 0
    assert _growth(tmp_path, "deepseek4") is None
    assert _growth(tmp_path, "unheard_of", attention__head_count=text_value("four")) is None


def test_file_type_is_guessed_where_the_header_has_none(tmp_path: Path) -> None:
    file = GgufBytes()
    assert file_type_name(read_model(file.write(tmp_path / "a.gguf"))) == "F32"
    file.pairs["general.file_type"] = number_value(1024 + 15)
    assert file_type_name(read_model(file.write(tmp_path / "b.gguf"))) == "Q4_K_M"
    file.pairs["general.file_type"] = number_value(777)
    assert file_type_name(read_model(file.write(tmp_path / "c.gguf"))) == "F32"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("blk.0.attn_norm.weight", "attention"),
        ("blk.0.post_attention_norm.weight", "attention"),
        ("blk.0.attn_q.bias", "attention"),
        ("blk.0.ssm_conv1d.weight", "attention"),
        ("blk.0.time_mix_key.weight", "attention"),
        ("blk.0.shortconv.conv.weight", "attention"),
        ("dec.blk.0.cross_attn_q.weight", "attention"),
        ("blk.0.ffn_norm.weight", "ffn"),
        ("blk.0.ffn_gate_inp.weight", "ffn"),
        ("blk.0.ffn_up_shexp.weight", "ffn"),
        ("blk.0.exp_probs_b.bias", "ffn"),
        ("blk.0.post_ffw_norm.weight", "ffn"),
        ("blk.0.ffn_gate_up_exps.weight", "experts"),
        ("blk.0.ffn_down_chexps.weight", "experts"),
        ("blk.0.ffn_down.7.weight", "experts"),
        ("blk.0.ffn_norm_exps.weight", "ffn"),
        ("blk.0.layer_output_scale.weight", "other"),
        ("blk.0.nextn.eh_proj.weight", "other"),
        ("output.weight", "other"),
    ],
)
def test_part_of_a_tensor(name: str, part: str) -> None:
    assert part_of_tensor(name) == part


def test_block_of_a_tensor() -> None:
    assert block_index("blk.12.attn_q.weight") == 12
    assert block_index("enc.blk.3.attn_q.weight") == 3
    assert block_index("output.weight") is None
    assert block_index("my_blk.3.attn_q.weight") is None
    assert block_index("blk.x.attn_q.weight") is None
