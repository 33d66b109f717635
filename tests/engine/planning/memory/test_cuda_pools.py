"""Bounds of the memory that CUDA takes during answers, compared with recordings on simulated cards."""

from __future__ import annotations

from typing import Any

import pytest

from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.device import Device, Rig, make_host
from engine.planning.layout.layout import Layout, Run
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.placement import place
from engine.planning.plan.report import make_row
from engine.planning.settings.context_settings import ContextSettings
from tests.support.truth import truth_model

CARD = Device("CUDA0", "card", "CUDA", "gpu", 1 << 40)
CASES = (
    ("llama-3.1-8b", "on", 512, 18, 20),
    ("llama-3.1-8b", "off", 512, 54, 168),
    ("llama-3.1-8b", "on", 2048, 32, 33),
    ("llama-3.1-8b", "off", 2048, 306, 564),
    ("qwen3-30b-a3b", "on", 512, 50, 51),
    ("qwen3-30b-a3b", "off", 512, 54, 167),
    ("qwen3-30b-a3b", "on", 2048, 70, 72),
    ("qwen3-30b-a3b", "off", 2048, 306, 564),
    ("gpt-oss-20b", "on", 512, 44, 45),
    ("gpt-oss-20b", "off", 512, 70, 295),
    ("gpt-oss-20b", "on", 2048, 60, 60),
    ("gpt-oss-20b", "off", 2048, 562, 1075),
    ("gemma-3-4b", "on", 512, 34, 36),
    ("gemma-3-4b", "off", 512, 46, 70),
    ("gemma-3-4b", "on", 2048, 34, 36),
    ("gemma-3-4b", "off", 2048, 106, 172),
    ("granite-4.0-h-tiny", "on", 512, 50, 52),
    ("granite-4.0-h-tiny", "off", 512, 50, 83),
    ("granite-4.0-h-tiny", "on", 2048, 54, 56),
    ("granite-4.0-h-tiny", "off", 2048, 136, 232),
)
"""Model, flash attention, micro batch, and MiB that an H100 that counts (`tests/engine/cuda/cards.c`) gave besides the
engine's buffers: after the first micro batch, and after 4,096 tokens filled the context."""


def memory_of(name: str, device: Device = CARD, *, n_ctx: int = 4096, **settings: Any) -> DeviceMemory:
    model = truth_model(name)
    layout = Layout(model.n_layers, (Run(device.id, 0, model.n_layers - 1),), device.id)
    rig = Rig((device,), make_host("host", 1 << 40))
    return ModelMemory(model).estimate(layout, ContextSettings(n_ctx=n_ctx, **settings), rig).devices[device.id]


@pytest.mark.parametrize(("name", "flash", "n_ubatch", "soon_mib", "full_mib"), CASES)
def test_the_forecast_is_never_below_what_cuda_takes_and_close(
    name: str, flash: str, n_ubatch: int, soon_mib: int, full_mib: int
) -> None:
    memory = memory_of(name, flash_attn=flash, n_ubatch=n_ubatch)
    buffers_bytes = memory.need_bytes - memory.overhead_bytes - memory.answering_bytes
    assert full_mib * MIB <= memory.answering_bytes
    assert memory.need_bytes - memory.overhead_bytes <= (buffers_bytes + full_mib * MIB) * 1.05
    assert memory.answering_bytes - memory.late_bytes >= soon_mib * MIB


def test_without_flash_attention_a_longer_context_takes_more_after_the_load() -> None:
    short, long = (memory_of("llama-3.1-8b", flash_attn="off", n_ctx=n_ctx) for n_ctx in (4096, 32768))
    # KQ in F16: 2 bytes x cells x tokens x heads.
    assert long.late_bytes - short.late_bytes == 2 * (32768 - 4096) * 512 * 32
    assert memory_of("llama-3.1-8b", flash_attn="on", n_ctx=32768).late_bytes == 0


def test_devices_of_other_backends_have_no_figure() -> None:
    for backend in ("Vulkan", "RPC", "Metal"):
        endpoint = "127.0.0.1:50052" if backend == "RPC" else None
        device = Device(f"{backend}0", "card", backend, "gpu", 1 << 40, endpoint=endpoint)
        assert memory_of("llama-3.1-8b", device).answering_bytes == 0


def test_a_row_counts_it_and_tells_the_buffers_alone() -> None:
    memory = DeviceMemory(weights_bytes=8 * MIB, overhead_bytes=4 * MIB, answering_bytes=2 * MIB, late_bytes=MIB)
    row = make_row(replace(CARD, free_bytes=13 * MIB, margin_bytes=0), memory, Grade.ESTIMATED)
    assert (row.need_bytes, row.is_short, row.buffer_bytes) == (14 * MIB, True, 8 * MIB)
    assert row.without_overhead().need_bytes == 8 * MIB


@pytest.mark.parametrize(
    ("changes", "card_bytes", "host_bytes"),
    [
        ({"n_ctx": 4096, "n_ubatch": 4096, "type_k": "q5_0", "type_v": "q5_0"}, 797_835_776, 491_716_736),
        ({"n_ctx": 4096, "n_ubatch": 4096}, 801_702_400, 491_389_056),
        (
            {"n_ctx": 4096, "n_ubatch": 4096, "type_k": "q5_0", "type_v": "q5_0", "pipeline": "off"},
            398_688_384,
            126_074_912,
        ),
        ({"n_ctx": 512, "n_ubatch": 512, "pipeline": "off"}, 8_145_024, 2_904_096),
    ],
)
def test_a_graph_that_grows_with_the_context_is_counted(
    changes: dict[str, Any], card_bytes: int, host_bytes: int
) -> None:
    """The compute buffers are those of a card that counts after batches that filled the context."""
    model = truth_model("minimax-m3-moe")
    rig = Rig((CARD, replace(CARD, id="CUDA1")), make_host("host", 1 << 40))
    layout = Layout(2, (Run("CUDA1", 0, 0), Run("CUDA0", 1, 1)), "CUDA0")
    context = ContextSettings(**{"flash_attn": "on", "pipeline": "on", "n_batch": 4096, **changes})
    memory = ModelMemory(model)
    devices = memory.estimate(layout, context, rig).devices
    tables = memory.for_context(context)
    assert tables is not None
    assert tables.compute is not None
    grown = tables.compute.grown_bytes(place(layout, rig, context))
    for name, held_bytes in (("CUDA0", card_bytes), ("CPU", host_bytes)):
        assert held_bytes <= devices[name].compute_bytes + grown[name] <= held_bytes * 1.001
        assert devices[name].answering_bytes >= devices[name].late_bytes >= grown[name]
