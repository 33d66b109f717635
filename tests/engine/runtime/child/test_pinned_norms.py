"""Norms that llama.cpp pins to the device of their layer: forecast as loaded, for any threshold of op offload."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.base.units import GIB
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.reader import read_model
from engine.planning.layout.engine_parameters import engine_parameters
from engine.planning.layout.layout import make_layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.messages import LoadedModel
from engine.runtime.protocol.requests import Load
from tests.engine.runtime.child.raw_child import RawChild, rpc_workers
from tests.support.models import write_tiny_llama

LAYERS = 8
CONTEXT = ContextSettings(n_ctx=1024, n_ubatch=128, threads=1, threads_batch=1, load_mode="none", pipeline="off")
RIG = Rig(tuple(Device(f"W{n}", f"W{n}", "RPC", "gpu", 4 * GIB) for n in range(2)), make_host("host", 64 * GIB))
LAYOUT = make_layout(LAYERS, [CPU_ID] * 2 + ["W0"] * 3 + ["W1"] * 3, CPU_ID)


@pytest.mark.parametrize("min_batch", [None, 1, 100_000])
@pytest.mark.parametrize("n_ubatch", [16, 128])
def test_the_threshold_of_op_offload_does_not_pin_norms(tmp_path: Path, min_batch: int | None, n_ubatch: int) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", n_layers=LAYERS, n_embd=256)
    context = msgspec.structs.replace(CONTEXT, op_offload_min_batch=min_batch, n_ubatch=n_ubatch)
    forecast = ModelMemory(read_model(path)).estimate(LAYOUT, context, RIG).devices
    with rpc_workers(None, None) as (_, refs), RawChild() as child:
        parameters = engine_parameters(LAYOUT, LAYERS)
        loaded = child.ask(Load(path=str(path), devices=refs, parameters=parameters, context=context))
    assert isinstance(loaded, LoadedModel), loaded
    sizes = dict.fromkeys(RIG.ids, 0)
    for part in loaded.parts:
        sizes[part.device] += part.compute_bytes
    assert sizes == {device: memory.compute_bytes for device, memory in forecast.items()}
