"""State of layers between batches: sizes of KV caches and recurrent state, and their growth with the context."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.model.architectures.record import Architecture
from engine.model.gguf.reader import read_model
from engine.planning.memory.backends import HOST_RULE, SizeRule
from engine.planning.memory.hyper_parameters import HyperParameters, read_state
from engine.planning.memory.kv_cache import context_shape, kv_bytes_per_token, layer_states
from engine.planning.settings.context_settings import ContextSettings
from tests.support.gguf_bytes import GgufBytes, Tensor, number_array, number_value, text_value
from tests.support.headers import write_real_header
from tests.support.truth import truth_model

HYPER = HyperParameters(
    n_embd=512,
    n_vocab=1000,
    n_ctx_train=4096,
    n_trunk_layers=2,
    n_head=(8, 8),
    n_head_kv=(2, 4),
    head_k=(64, 64),
    head_v=(64, 64),
    window=0,
    sliding=(False, False),
    recurrent=(False, False),
    caching=(True, True),
    recurrent_widths=(0, 0),
    latent=False,
    indexer_widths=(0, 0),
)
SMALL = ContextSettings(n_ctx=1000)


def kv_layer_bytes(hyper: HyperParameters, context: ContextSettings, rule: SizeRule = HOST_RULE) -> tuple[int, ...]:
    states = layer_states(hyper, Architecture(), context)
    return tuple(sum(tensor.size_bytes(rule) for tensor in state.cache) for state in states)


@pytest.mark.parametrize(
    ("changes", "n_cells", "n_streams"),
    [
        ({}, 1024, 1),
        ({"n_ctx": 0}, 4096, 1),
        ({"n_seq_max": 4}, 256, 4),
        ({"n_ctx": 5000, "n_seq_max": 3}, 1792, 3),
        ({"n_seq_max": 4, "kv_unified": True}, 1024, 1),
    ],
)
def test_cells_are_padded_per_sequence(changes: dict[str, int], n_cells: int, n_streams: int) -> None:
    shape = context_shape(msgspec.structs.replace(SMALL, **changes), HYPER.n_ctx_train)
    assert (shape.n_cells, shape.n_streams) == (n_cells, n_streams)


def test_batches_are_limited_by_the_context() -> None:
    shape = context_shape(ContextSettings(n_ctx=300, n_batch=2048, n_ubatch=512), 4096)
    assert (shape.n_batch, shape.n_ubatch) == (300, 300)


@pytest.mark.parametrize(
    ("kv_type", "bytes_per_32"),
    [
        ("f32", 128),
        ("f16", 64),
        ("bf16", 64),
        ("q8_0", 34),
        ("q5_1", 24),
        ("q5_0", 22),
        ("q4_1", 20),
        ("q4_0", 18),
        ("iq4_nl", 18),
    ],
)
def test_every_cache_type(kv_type: str, bytes_per_32: int) -> None:
    context = msgspec.structs.replace(SMALL, type_k=kv_type, type_v=kv_type)
    # Two heads of 64 in the first layer, four in the second; K and V; 1024 cells.
    assert kv_layer_bytes(HYPER, context) == (2 * 1024 * 4 * bytes_per_32, 2 * 1024 * 8 * bytes_per_32)


def test_without_flash_attention_every_v_is_as_wide_as_the_widest() -> None:
    with_flash = kv_layer_bytes(HYPER, SMALL)
    without = kv_layer_bytes(HYPER, msgspec.structs.replace(SMALL, flash_attn="off"))
    assert without[1] == with_flash[1]
    assert without[0] == 1024 * 2 * (128 + 256)


def test_row_padding_applies_to_quantised_caches_only() -> None:
    rule = SizeRule(alignment_bytes=128, pads_rows=True)
    assert kv_layer_bytes(HYPER, SMALL, rule) == kv_layer_bytes(HYPER, SMALL)
    quantised = msgspec.structs.replace(SMALL, type_k="q8_0")
    # 384 elements more, 12 blocks of 34 bytes, rounded up to 128.
    assert kv_layer_bytes(HYPER, quantised, rule)[0] - kv_layer_bytes(HYPER, quantised)[0] == 512


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
