"""The engine on Vulkan devices: Mesa's llvmpipe, three times. It has buffers, pinned memory and an order of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import msgspec
import pytest

from engine.devices.device import CPU_ID, Rig
from engine.gguf.reader import read_model
from engine.layout.layout import Layout, Override, Run
from engine.memory.model_memory import ModelMemory
from engine.plan.edit import Edit
from engine.plan.plan import Plan
from engine.plan.requests import load_request
from engine.process.one_shot import Questions
from engine.protocol.messages import AllocationFailure, Generate, Generated, LoadedModel
from engine.rigs.discovery import discover
from engine.rigs.self_test import try_repeated
from engine.session.reports import loaded_event
from engine.settings.context_settings import ContextSettings
from tests.support.models import write_tiny_llama, write_tiny_moe
from tests.support.patience import DEADLINE_S

pytestmark = pytest.mark.engine("vulkan")

V0, V1, V2 = "Vulkan0", "Vulkan1", "Vulkan2"
CONTEXT = ContextSettings(n_ctx=512, n_batch=256, n_ubatch=128, threads=2, threads_batch=2)
PROMPT = "One device after another."
_N_LAYERS = 6
_PARTS = ("weights_bytes", "mapped_bytes", "kv_cache_bytes", "recurrent_bytes", "compute_bytes", "output_bytes")
_LONGEST_S = 4 * DEADLINE_S


@pytest.fixture(scope="module", autouse=True)
def three_devices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GGML_VK_VISIBLE_DEVICES", "0,0,0")
        yield


@pytest.fixture(scope="module")
def rig(three_devices: None) -> Rig:
    found = discover(timeout_s=_LONGEST_S)
    assert [(device.id, device.backend) for device in found.devices] == [(each, "Vulkan") for each in (V0, V1, V2)], (
        "there is no Vulkan device: is mesa-vulkan-drivers installed, and the engine built with Vulkan?"
    )
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelMemory]:
    folder = tmp_path_factory.mktemp("models")
    shape = {"n_layers": _N_LAYERS, "n_embd": 128, "n_head": 4, "n_ff": 256, "n_ctx_train": 2048}
    dense, sparse = partial(write_tiny_llama, **shape), partial(write_tiny_moe, **shape)  # type: ignore[arg-type]
    paths = {
        "dense": dense(folder / "dense.gguf"),
        "tied": dense(folder / "tied.gguf", tied=True, file_type="Q4_0"),
        "experts": sparse(folder / "experts.gguf", file_type="Q8_0"),
    }
    return {name: ModelMemory(read_model(path)) for name, path in paths.items()}


def _layout(*places: str, output: str | None = None, overrides: tuple[Override, ...] = ()) -> Layout:
    """Return a layout that puts one layer after another on these places."""
    runs: list[Run] = []
    for index, place in enumerate(places):
        if runs and runs[-1].device == place:
            runs[-1] = replace(runs[-1], last=index)
        else:
            runs.append(Run(place, index, index))
    return Layout(len(places), tuple(runs), output or places[-1], overrides=overrides)


LAYOUTS = {
    "one device": _layout(*[V0] * 6),
    "three devices": _layout(V0, V0, V1, V1, V2, V2),
    "CPU between": _layout(V0, V0, CPU_ID, CPU_ID, V1, V1),
    "CPU first": _layout(CPU_ID, CPU_ID, V0, V0, V0, V1),
    "CPU first and between": _layout(CPU_ID, V1, V1, CPU_ID, V0, V0),
    "output on the CPU": _layout(V0, V0, V0, V1, V1, V1, output=CPU_ID),
    "output elsewhere": _layout(V0, V0, V0, V0, V0, V0, output=V2),
    "feed-forward weights elsewhere": _layout(
        V0, V0, V0, V1, V1, V1, overrides=(Override(CPU_ID, pattern=r"blk\.[13]\.ffn"),)
    ),
}
CONTEXTS = {
    "plain": CONTEXT,
    "not mapped": msgspec.structs.replace(CONTEXT, load_mode="none"),
    "no flash attention": msgspec.structs.replace(CONTEXT, flash_attn="off", n_ubatch=256),
    "cache in eight bits": msgspec.structs.replace(CONTEXT, flash_attn="on", type_k="q8_0", type_v="q8_0"),
    "cache in four bits": msgspec.structs.replace(CONTEXT, flash_attn="on", type_k="q4_0", type_v="q4_0"),
    "cache on the CPU": msgspec.structs.replace(CONTEXT, offload_kqv=False),
    "no help with large batches": msgspec.structs.replace(CONTEXT, op_offload=False),
    "pipeline": msgspec.structs.replace(CONTEXT, pipeline="on"),
    "several requests": msgspec.structs.replace(CONTEXT, n_seq_max=3, n_ctx=768),
}


def _plan(memory: ModelMemory, rig: Rig, layout: Layout, context: ContextSettings) -> Plan:
    return Plan(memory, rig, Edit(layout, context))


@contextmanager
def _loaded(plan: Plan, argv: list[str] | None = None) -> Iterator[tuple[Questions, LoadedModel | AllocationFailure]]:
    """Load a plan in a child of its own."""
    answer: type[LoadedModel | AllocationFailure] = LoadedModel | AllocationFailure  # type: ignore[assignment]
    with Questions(timeout_s=_LONGEST_S, argv=argv, name="Vulkan load") as child:
        yield child, child.ask(load_request(plan), answer)


def _differences(plan: Plan, loaded: LoadedModel | AllocationFailure) -> dict[str, tuple[int, int]]:
    """Return every number that was not forecast to the byte: what was measured, and what was forecast."""
    assert isinstance(loaded, LoadedModel), loaded
    forecast = {row.id: row for row in plan.forecast}
    return {
        f"{row.id} {part}": (getattr(row, part), getattr(forecast[row.id], part))
        for row in loaded_event(plan, loaded).devices
        for part in _PARTS
        if getattr(row, part) != getattr(forecast[row.id], part)
    }


def _answer(child: Questions, tokens: int = 12) -> str:
    return child.ask(Generate(id=1, prompt=PROMPT, max_tokens=tokens, temperature=0.0), Generated).text


def test_devices_tell_what_their_buffers_are_like(rig: Rig) -> None:
    for device in rig.devices:
        assert device.alignment_bytes is not None
        assert device.host_alignment_bytes is not None
        assert device.largest_tensor_bytes is not None
        assert device.total_bytes > 0


@pytest.mark.parametrize("name", ["dense", "tied", "experts"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_loads_are_forecast_to_the_byte(name: str, layout: Layout, models: dict[str, ModelMemory], rig: Rig) -> None:
    plan = _plan(models[name], rig, layout, CONTEXT)
    with _loaded(plan) as (_, loaded):
        assert _differences(plan, loaded) == {}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("layout", ["three devices", "CPU between", "CPU first"])
def test_settings_are_forecast_to_the_byte(
    layout: str, context: ContextSettings, models: dict[str, ModelMemory], rig: Rig
) -> None:
    plan = _plan(models["dense"], rig, LAYOUTS[layout], context)
    with _loaded(plan) as (_, loaded):
        assert _differences(plan, loaded) == {}


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_every_layout_answers_as_the_cpu_does(name: str, models: dict[str, ModelMemory], rig: Rig) -> None:
    with _loaded(_plan(models[name], rig, _layout(*[CPU_ID] * _N_LAYERS), CONTEXT)) as (child, _):
        expected = _answer(child)
    for words in ("three devices", "CPU between", "CPU first and between"):
        with _loaded(_plan(models[name], rig, LAYOUTS[words], CONTEXT)) as (child, _):
            assert _answer(child) == expected, words


def test_a_device_that_comes_twice_computes_the_same_each_time(models: dict[str, ModelMemory], rig: Rig) -> None:
    assert try_repeated(rig, V0, models["dense"].model.paths[0], rounds=3).passed


def test_two_processes_share_a_device(models: dict[str, ModelMemory], rig: Rig) -> None:
    plan = _plan(models["dense"], rig, LAYOUTS["one device"], CONTEXT)
    with _loaded(plan) as (first, _), _loaded(plan) as (second, loaded):
        assert _differences(plan, loaded) == {}
        assert _answer(first) == _answer(second)
