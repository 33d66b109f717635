"""Headers with wrong numbers: no exception, and no KV cache or compute buffer computed from nonsense."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout import Layout, Run
from engine.planning.memory.estimate import MemoryEstimate
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from tests.support.plans import estimate
from tests.support.truth import truth_model

RIG = Rig((Device("CUDA0", "card", "CUDA", "gpu", 1 << 35),), make_host("host", 1 << 36))
LAYOUT = Layout(16, (Run(CPU_ID, 0, 3), Run("CUDA0", 4, 15)), "CUDA0")
KEYS = (
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "context_length",
    "nextn_predict_layers",
    "expert_used_count",
)
wrong_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), 1 << 63),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-3, 40), max_size=20).map(tuple),
    st.lists(st.floats(), max_size=20).map(tuple),
)


def _with(model: ModelFile, changes: dict[str, Any]) -> ModelFile:
    return replace(
        model, metadata={**model.metadata, **{f"{model.architecture}.{key}": value for key, value in changes.items()}}
    )


def _estimate(model: ModelFile) -> MemoryEstimate:
    return estimate(model, LAYOUT, ContextSettings(), RIG)


@given(changes=st.dictionaries(st.sampled_from(KEYS), wrong_values, min_size=1, max_size=4))
def test_any_hyper_parameters_give_an_estimate(changes: dict[str, Any]) -> None:
    found = _estimate(_with(truth_model("llama-3.2-1b"), changes))
    for memory in found.devices.values():
        assert memory.need_bytes >= 0
        if found.probe_only is not None:
            assert memory.kv_cache_bytes == memory.compute_bytes == memory.output_bytes == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("embedding_length", None),
        ("embedding_length", 0),
        ("attention.head_count", -8),
        ("attention.head_count", True),
        ("attention.head_count", 32.0),
        ("attention.head_count_kv", (8,) * 15),
        ("attention.head_count_kv", (8,) * 15 + (0,)),
        ("attention.head_count_kv", 4),
        ("attention.key_length", "64"),
        ("context_length", 1 << 40),
    ],
)
def test_wrong_numbers_are_left_to_the_probe(key: str, value: Any) -> None:
    good = truth_model("llama-3.2-1b")
    found = _estimate(_with(good, {key: value}))
    assert found.probe_only is not None
    assert f"llama.{key} is" in found.probe_only or "attn_" in found.probe_only or key in found.probe_only
    right = _estimate(good)
    weights = {device_id: memory.weights_bytes for device_id, memory in found.devices.items()}
    assert weights == {device_id: memory.weights_bytes for device_id, memory in right.devices.items()}


def test_an_unknown_architecture_has_weights_only() -> None:
    model = replace(truth_model("llama-3.2-1b"), architecture="from-tomorrow")
    found = _estimate(model)
    assert found.probe_only is not None
    assert "from-tomorrow" in found.probe_only
    assert found.devices["CUDA0"].weights_bytes > 0
    assert found.devices["CUDA0"].kv_cache_bytes == 0


@pytest.mark.parametrize(("mapping", "unknown"), [((-1, -1), ()), ((-1, 0), ("compute",))])
def test_images_that_some_layers_add_are_left_to_the_probe(mapping: tuple[int, ...], unknown: tuple[str, ...]) -> None:
    model = _with(truth_model("granite-dense"), {"deepstack_mapping": mapping})
    assert ModelMemory(model).unknown == unknown


@pytest.mark.parametrize("shape", [(), (2048,), (2048, 512, 1, 1), (0, 0), (1, 512)])
def test_k_projections_of_odd_shape(shape: tuple[int, ...]) -> None:
    good = truth_model("llama-3.2-1b")
    odd = tuple(
        replace(tensor, shape=shape) if "attn_k." in tensor.name else tensor for tensor in good.blocks[3].tensors
    )
    blocks = (*good.blocks[:3], replace(good.blocks[3], tensors=odd), *good.blocks[4:])
    memory = ModelMemory(replace(good, blocks=blocks))
    assert (memory.probe_only is None) == (shape[:2] == (2048, 512))


@given(
    n_ctx=st.integers(-5, 1 << 31),
    n_batch=st.integers(-5, 1 << 31),
    n_ubatch=st.integers(-5, 1 << 31),
    n_seq_max=st.integers(-5, 1 << 31),
)
def test_any_context_settings_give_an_estimate(n_ctx: int, n_batch: int, n_ubatch: int, n_seq_max: int) -> None:
    context = ContextSettings(n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_ubatch, n_seq_max=n_seq_max)
    found = estimate(truth_model("llama-3.2-1b"), LAYOUT, context, RIG)
    assert all(memory.need_bytes >= 0 for memory in found.devices.values())


def test_a_layout_for_another_model_has_no_numbers() -> None:
    found = estimate(truth_model("llama-3.1-8b"), LAYOUT, ContextSettings(), RIG)
    assert found.probe_only is not None
    assert "16 layers" in found.probe_only
    assert all(memory.need_bytes == 0 for memory in found.devices.values())


def test_unusual_block_tensors_are_no_obstacle() -> None:
    good = truth_model("llama-3.2-1b")
    norm = replace(good.global_tensors[0], name="token_embd_norm.weight", shape=(2048,), size_bytes=8192)
    memory = ModelMemory(replace(good, global_tensors=(*good.global_tensors, norm)))
    found = memory.estimate(LAYOUT, ContextSettings(load_mode="none"), RIG)
    before = estimate(good, LAYOUT, ContextSettings(load_mode="none"), RIG)
    # It goes with the first layer, which is on the CPU here.
    assert found.devices[CPU_ID].weights_bytes - before.devices[CPU_ID].weights_bytes == 8192


def test_devices_that_the_rig_does_not_have_take_nothing() -> None:
    layout = Layout(16, (Run(CPU_ID, 0, 3), Run("gone", 4, 15)), "gone")
    found = estimate(truth_model("llama-3.2-1b"), layout, ContextSettings(), RIG)
    assert set(found.devices) == {"CUDA0", CPU_ID}
    assert found.devices["CUDA0"].need_bytes == 0


def test_auto_flash_attention_ends_off_where_a_card_cannot_do_the_head_size() -> None:
    good = truth_model("llama-3.2-1b")
    # Heads of 32 in place of 64: the same widths, but no kernel for them.
    odd = ModelMemory(_with(good, {"attention.head_count": 64, "attention.head_count_kv": 16}))
    assert odd.probe_only is None
    auto, off, on = (
        odd.estimate(LAYOUT, ContextSettings(flash_attn=mode), RIG).devices["CUDA0"].compute_bytes
        for mode in ("auto", "off", "on")
    )
    # Values were stored as for flash attention, so that auto and off differ by a copy of them.
    assert min(auto, off) > on
