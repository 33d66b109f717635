"""Cache sizes against numbers worked out by hand."""

from __future__ import annotations

import msgspec
import pytest

from engine.architectures.record import Architecture
from engine.memory.backends import HOST_RULE, SizeRule
from engine.memory.hyper_parameters import HyperParameters
from engine.memory.kv_cache import context_shape, layer_states
from engine.settings.context_settings import ContextSettings

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
