"""Loads with MTP heads in a real child: each device holds the forecast bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.machines.rigs.lab import LabRig
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import make_layout
from engine.planning.memory.drafts import Draft
from engine.planning.memory.estimate import DeviceMemory
from engine.planning.memory.side_files import SideFiles
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.probing.probe import probe
from tests.support.draft_loads import check_load
from tests.support.load_specs import plan_of
from tests.support.mtp_models import write_mtp_model

CONTEXT = ContextSettings(n_ctx=512, n_batch=128, n_ubatch=64, n_seq_max=2, threads=1, load_mode="none")
LAYOUTS = {
    "host": [CPU_ID] * 5,
    "one": ["RPC0"] * 5,
    "front": [CPU_ID, CPU_ID, "RPC0", "RPC0", "RPC0"],
    "apart": ["RPC0", "RPC0", "RPC0", "RPC0", "RPC1"],
    "apart, front": [CPU_ID, "RPC0", "RPC0", "RPC0", "RPC1"],
    "on host": ["RPC0", "RPC0", "RPC0", "RPC0", CPU_ID],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "apart": {"kv_unified": False, "n_seq_max": 4},
    "single": {"n_seq_max": 1, "flash_attn": "off"},
    "quantised": {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"},
    "not offloaded": {"offload_kqv": False},
}


@pytest.fixture(scope="module", params=["qwen35", "tied", "qwen35moe", "qwen3next"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    if request.param == "tied":
        return read_model(write_mtp_model(path, tied=True))
    return read_model(write_mtp_model(path, architecture=request.param))


@pytest.fixture(scope="module")
def lab() -> Iterator[LabRig]:
    with LabRig([64 * MIB, 64 * MIB]) as lab:
        yield lab


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_with_heads_holds_what_was_forecast_to_the_byte(
    model: ModelFile, lab: LabRig, layout: str, settings: str
) -> None:
    context = msgspec.structs.replace(CONTEXT, **SETTINGS[settings])
    placed = make_layout(5, LAYOUTS[layout])
    check_load(plan_of(model, lab.rig, placed, context, SideFiles(draft=Draft("mtp"))))


def test_a_probe_over_workers_has_the_numbers_of_the_forecast(model: ModelFile, lab: LabRig) -> None:
    plan = plan_of(model, lab.rig, make_layout(5, LAYOUTS["front"]), CONTEXT, SideFiles(draft=Draft("mtp")))
    # llama.cpp tells the state of both kinds of layers in one number.
    assert [joined(row.memory) for row in probe(plan).forecast] == [joined(row.memory) for row in plan.forecast]


def joined(memory: DeviceMemory) -> DeviceMemory:
    return replace(memory, kv_cache_bytes=memory.kv_cache_bytes + memory.recurrent_bytes, recurrent_bytes=0)
