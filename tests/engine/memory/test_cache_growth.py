"""Bytes of cache for one more token, from headers of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.gguf.reader import read_model
from engine.memory.hyper_parameters import read_state
from engine.memory.kv_cache import kv_bytes_per_token, layer_states
from engine.settings.context_settings import ContextSettings
from tests.support.gguf_bytes import GgufBytes, Tensor, number_array, number_value, text_value
from tests.support.headers import write_real_header
from tests.support.truth import truth_model


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
def test_real_headers(tmp_path: Path, name: str, growth: int) -> None:
    assert kv_bytes_per_token(read_model(write_real_header(tmp_path, name))) == growth


def _growth(tmp_path: Path, architecture: str, **numbers: bytes) -> int | None:
    n_layers = 6
    file = GgufBytes()
    file.pairs = {
        "general.architecture": text_value(architecture),
        f"{architecture}.block_count": number_value(n_layers),
        f"{architecture}.context_length": number_value(2048),
        f"{architecture}.embedding_length": number_value(64),
        f"{architecture}.attention.head_count": number_value(4),
    }
    file.pairs |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in numbers.items()}
    file.tensors = [Tensor("token_embd.weight", (64, 300))]
    file.tensors += [Tensor(f"blk.{index}.attn_norm.weight", (64,)) for index in range(n_layers)]
    return kv_bytes_per_token(read_model(file.write(tmp_path / "growth.gguf")))


def test_what_grows(tmp_path: Path) -> None:
    full = 2 * 4 * (16 + 16)
    assert _growth(tmp_path, "llama") == 6 * full
    assert _growth(tmp_path, "llama", attention__head_count_kv=number_array([4, 2, 0, 0, 0, 1])) == 7 * full // 4
    assert _growth(tmp_path, "llama", attention__key_length=number_value(24)) == 6 * 2 * 4 * (24 + 16)
    assert _growth(tmp_path, "llama", nextn_predict_layers=number_value(1)) == 5 * full
    assert _growth(tmp_path, "bert") == 0


def test_windows_do_not_grow(tmp_path: Path) -> None:
    full = 2 * 4 * (16 + 16)
    window = number_value(128)
    assert _growth(tmp_path, "llama", attention__sliding_window=window) == 6 * full, "llama.cpp ignores it"
    assert _growth(tmp_path, "gemma2", attention__sliding_window=window) == 3 * full
    assert _growth(tmp_path, "gemma2") == 3 * full, "llama.cpp knows the window"
    pattern = number_array([1, 1, 0, 1, 1, 1], kind=7)
    sliding = {"attention__sliding_window": window, "attention__sliding_window_pattern": pattern}
    assert _growth(tmp_path, "gemma4", **sliding) == full


def test_what_the_header_does_not_tell(tmp_path: Path) -> None:
    assert _growth(tmp_path, "gemma4", attention__sliding_window=number_value(128)) is None
    assert _growth(tmp_path, "llama", attention__head_count=text_value("four")) is None
    assert _growth(tmp_path, "unheard_of") is None


@pytest.mark.parametrize("name", ["deepseek4-moe", "glm5-next-moe", "gemma-3-4b", "jamba-dense", "t5-dense"])
def test_growth_is_that_of_the_cache(name: str) -> None:
    model = truth_model(name)
    growth = kv_bytes_per_token(model)
    assert growth is not None
    hyper, architecture = read_state(model)
    n_tokens = 1 << 16
    caches = [
        sum(2 * tensor.width * tensor.n_rows for state in states for tensor in state.cache)
        for states in (
            layer_states(hyper, architecture, ContextSettings(n_ctx=n_ctx, flash_attn="on"))
            for n_ctx in (n_tokens, 3 * n_tokens)
        )
    ]
    assert caches[1] - caches[0] == 2 * n_tokens * growth
