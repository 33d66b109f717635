"""A plan exported to llama-server and imported again is equal, in everything that the command can express."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from engine.base.units import GIB
from engine.devices.device import CPU_ID, Capabilities, Device, Rig, make_host
from engine.model.gguf.reader import read_model
from engine.planning.exchange.exporting import Target, export_plan
from engine.planning.exchange.importing import arrange, read_foreign
from engine.planning.layout.layout import Layout, Override, make_layout
from engine.planning.layout.patterns import OVERRIDE_PARTS
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import (
    FLASH_ATTENTION_MODES,
    KV_TYPES,
    LOAD_MODES,
    NUMA_MODES,
    ContextSettings,
)
from engine.planning.settings.table import SETTINGS
from tests.support.load_specs import worker_device
from tests.support.models import write_tiny_moe
from tests.support.selection import examples
from tests.support.setting_values import others

N_LAYERS = 9
WORKERS = ("10.0.0.1:50052", "10.0.0.2:50052")
DEVICES = ("CUDA0", "CUDA1", "RPC0", "RPC1")
PATTERNS = (r"blk\.0\.ffn_.*", r"^output\.weight$", "ffn_(up|down)", r"attn_[qkv]\.weight", r"blk\.(1|2|3)\.attn_.*")


def gpu(device_id: str) -> Device:
    """Return a card that may be twice in a layout."""
    return Device(
        device_id, device_id, "CUDA", "gpu", 24 * GIB, 24 * GIB, capabilities=Capabilities(True, True, repeatable=True)
    )


RIG = Rig(
    (*map(gpu, DEVICES[:2]), *(worker_device(DEVICES[2 + index], host, 8 * GIB) for index, host in enumerate(WORKERS))),
    make_host("host", 64 * GIB, 60 * GIB),
)


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> ModelMemory:
    """Return a model with experts."""
    return ModelMemory(
        read_model(write_tiny_moe(tmp_path_factory.mktemp("models") / "it's a moe.gguf", n_layers=N_LAYERS, n_embd=128))
    )


@st.composite
def overrides(draw: st.DrawFn) -> Override:
    """Draw an override of a part or of a pattern."""
    device = draw(st.sampled_from((CPU_ID, *DEVICES)))
    if draw(st.booleans()):
        return Override(device, pattern=draw(st.sampled_from(PATTERNS)))
    part = draw(st.sampled_from(OVERRIDE_PARTS))
    if draw(st.booleans()):
        return Override(device, part)
    first = draw(st.integers(0, N_LAYERS - 1))
    return Override(device, part, first, draw(st.integers(first, N_LAYERS - 1)))


@st.composite
def sayable_layouts(draw: st.DrawFn) -> Layout:
    """Draw a layout with the CPU at the front only, and devices in any order, also twice."""
    leading = draw(st.integers(0, N_LAYERS))
    homes = [CPU_ID] * leading
    while len(homes) < N_LAYERS:
        homes += [draw(st.sampled_from(DEVICES))] * draw(st.integers(1, N_LAYERS - len(homes)))
    # After the front, the output layer is on a device; with everything on the CPU it may be there as well.
    outputs: Sequence[str] = (*DEVICES, CPU_ID) if leading == N_LAYERS else DEVICES
    layout = make_layout(N_LAYERS, homes, draw(st.sampled_from(outputs)))
    chosen = tuple(draw(st.lists(overrides(), max_size=3)))
    mode = draw(st.sampled_from(("layer", "layer", "tensor", "row")))
    if mode == "layer":
        return Layout(N_LAYERS, layout.runs, layout.output_device, overrides=chosen)
    members = draw(st.lists(st.sampled_from(DEVICES), min_size=1, unique=True))
    shares = tuple((member, draw(st.sampled_from((1.0, 2.0, 3.5, 0.3)))) for member in members)
    main = draw(st.sampled_from(members)) if mode == "row" else None
    return Layout(
        N_LAYERS, layout.runs, layout.output_device, "tensor" if mode == "tensor" else "row", shares, main, chosen
    )


CHOSEN = {
    "n_ctx": st.sampled_from((256, 4096, 10000)),
    "n_batch": st.sampled_from((64, 512, 2048)),
    "n_ubatch": st.sampled_from((32, 512)),
    "n_seq_max": st.sampled_from((1, 2, 4)),
    "type_k": st.sampled_from(KV_TYPES),
    "type_v": st.sampled_from(KV_TYPES),
    "flash_attn": st.sampled_from(FLASH_ATTENTION_MODES),
    "offload_kqv": st.booleans(),
    "op_offload": st.booleans(),
    "op_offload_min_batch": st.none() | st.integers(1, 999),
    "swa_full": st.booleans(),
    "kv_unified": st.booleans(),
    "load_mode": st.sampled_from(LOAD_MODES),
    "threads": st.none() | st.integers(1, 64),
    "threads_batch": st.none() | st.integers(1, 64),
    "pipeline": st.sampled_from(("auto", "off")),
    "numa": st.sampled_from(NUMA_MODES),
    "image_min_tokens": st.none() | st.integers(1, 64),
    "image_max_tokens": st.none() | st.integers(64, 4096),
}
"""Values of settings of which some do not suit the others or the model."""
ANY_VALUE = {setting.key: st.sampled_from([setting.default, *others(setting)]) for setting in SETTINGS}
contexts = st.builds(ContextSettings, **ANY_VALUE | CHOSEN)


def back(plan: Plan, text: str) -> Plan:
    """Return the plan that is imported from `text`."""
    found = arrange(read_foreign(text), plan.model, plan.rig)
    assert not [note for note in found.notes if "ot imported" in note or "Not among" in note], found.notes
    return plan.with_edit(Edit(found.layout, found.context))


def used(plan: Plan) -> ContextSettings:
    """Return the settings as far as they have a meaning: an open threshold is the engine's own."""
    return msgspec.structs.replace(plan.settings, op_offload_min_batch=plan.settings.offload_batch)


@pytest.mark.parametrize("target", ["llama-server", "llama-swap"])
@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(layout=sayable_layouts(), context=contexts)
def test_a_plan_comes_back_as_it_was(
    memory: ModelMemory, target: Target, layout: Layout, context: ContextSettings
) -> None:
    plan = Plan(memory, RIG, Edit(layout, context))
    assume(not plan.violations)
    again = back(plan, export_plan(plan, target).text)
    assert again.parameters == plan.parameters
    assert used(again) == used(plan)
    if layout.split_mode == "layer":
        assert (again.edit.layout.runs, again.edit.layout.output_device) == (layout.runs, layout.output_device)
    # Once more: what was imported is exported as the same text.
    assert export_plan(again, target).text == export_plan(plan, target).text
