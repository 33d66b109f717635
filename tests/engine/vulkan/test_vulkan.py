"""The engine on Vulkan (Mesa's llvmpipe, as three devices), which has its own buffers, pinned memory and order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, Run
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.child.load.quantise import FILE_TYPES
from engine.runtime.plan_requests import load_request
from engine.runtime.protocol.messages import Generated, LoadedModel, Piece
from engine.runtime.protocol.requests import Generate
from engine.runtime.session.reports import loaded_event
from tests.engine.vulkan.conftest import LONGEST_S, V0, V1, V2
from tests.support.conversation import Conversation
from tests.support.models import write_tiny_llama, write_tiny_moe
from tests.support.real_model import quantised
from tests.support.truth import Measured, TruthCase, case_of
from tests.zoo.pack import pack_case
from tests.zoo.record import DEFAULTS, choose_cases, describe, layout_cases, measure_cases
from tests.zoo.record import Engine as ZooEngine

pytestmark = pytest.mark.engine("vulkan")

CONTEXT = ContextSettings(n_ctx=512, n_batch=256, n_ubatch=128, threads=2, threads_batch=2)
PROMPT = "One device after another."
SEVERAL_BUFFERS = ("one-device-full", "flash-off", "ubatch-2048")
"""Of several devices that work as a pipeline the engine places copies one by one, which decides where a buffer ends."""
_N_LAYERS = 6
_PARTS = ("weights_bytes", "mapped_bytes", "kv_cache_bytes", "recurrent_bytes", "compute_bytes", "output_bytes")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelMemory]:
    folder = tmp_path_factory.mktemp("models")
    dense = partial(write_tiny_llama, n_layers=_N_LAYERS, n_embd=128, n_head=4, n_ff=256, n_ctx_train=2048)
    sparse = partial(write_tiny_moe, n_layers=_N_LAYERS, n_embd=128, n_head=4, n_ff=256, n_ctx_train=2048)
    paths = {
        "dense": dense(folder / "dense.gguf"),
        "tied": dense(folder / "tied.gguf", tied=True, file_type="Q4_0"),
        "experts": sparse(folder / "experts.gguf", file_type="Q8_0"),
    }
    return {name: ModelMemory(read_model(path)) for name, path in paths.items()}


def _layout(*places: str) -> Layout:
    """Return a layout that puts one layer after another on these places."""
    runs: list[Run] = []
    for index, place in enumerate(places):
        if runs and runs[-1].device == place:
            runs[-1] = replace(runs[-1], last=index)
        else:
            runs.append(Run(place, index, index))
    return Layout(len(places), tuple(runs), places[-1])


LAYOUTS = {
    "one device": _layout(*[V0] * 6),
    "three devices": _layout(V0, V0, V1, V1, V2, V2),
    "CPU between": _layout(V0, V0, CPU_ID, CPU_ID, V1, V1),
    "CPU first and between": _layout(CPU_ID, V1, V1, CPU_ID, V0, V0),
}


def _plan(memory: ModelMemory, rig: Rig, layout: Layout, context: ContextSettings) -> Plan:
    return Plan(memory, rig, Edit(layout, context))


@contextmanager
def _loaded(plan: Plan) -> Iterator[tuple[Conversation, LoadedModel]]:
    """Load a plan in a child of its own."""
    with Conversation() as child:
        loaded = child.ask(load_request(plan), LONGEST_S)
        assert isinstance(loaded, LoadedModel), loaded
        yield child, loaded


def _differences(plan: Plan, loaded: LoadedModel) -> dict[str, tuple[int, int]]:
    """Return every number that was not forecast to the byte: what was measured, and what was forecast."""
    forecast = {row.id: row for row in plan.forecast}
    return {
        f"{row.id} {part}": (getattr(row, part), getattr(forecast[row.id], part))
        for row in loaded_event(plan, loaded).devices
        for part in _PARTS
        if getattr(row, part) != getattr(forecast[row.id], part)
    }


def _answer(child: Conversation) -> str:
    done = child.ask(Generate(id=1, prompt=PROMPT, max_tokens=12, temperature=0.0), LONGEST_S)
    assert isinstance(done, Generated), done
    return "".join(message.text for message in child.heard if isinstance(message, Piece))


def test_devices_tell_what_their_buffers_are_like(rig: Rig) -> None:
    for device in rig.devices:
        assert device.buffers.alignment_bytes is not None
        assert device.buffers.host_alignment_bytes is not None
        assert device.buffers.largest_tensor_bytes is not None
        assert device.buffers.largest_buffer_bytes is not None
        assert device.total_bytes > 0
        assert not device.capabilities.tensor_split


@pytest.mark.parametrize("name", ["dense", "tied", "experts"])
def test_loads_are_forecast_to_the_byte(name: str, models: dict[str, ModelMemory], rig: Rig) -> None:
    """Real loads without a token: llvmpipe needs minutes to compile what a token needs."""
    memory = models[name]
    path = memory.model.paths[0]
    facts = describe(path)
    cases = [*choose_cases(facts, tiny=True), *layout_cases(facts, tiny=True)]
    results = measure_cases(path, cases, ZooEngine(Path(sys.executable), card="vulkan"), real=True)
    assert len(results) == len(cases)
    found: list[str] = []
    for result in results:
        case = case_of(memory.model, {**DEFAULTS, **pack_case(result, "vulkan", "real")})
        assert case.refused is None, case.refused
        if not case.lists_idle_devices:
            found += _off(memory, replace(case, rig=_like(case.rig, rig)))
    assert found == []


@pytest.mark.parametrize("most_bytes", [1 << 18, 1 << 20])
def test_buffers_above_the_largest_are_several(
    most_bytes: int, models: dict[str, ModelMemory], rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's limit is lowered, as a buffer of 1 GiB would take long."""
    monkeypatch.setenv("GGML_VK_SUBALLOCATION_BLOCK_SIZE", str(most_bytes))
    memory = models["dense"]
    path = memory.model.paths[0]
    cases = [case for case in choose_cases(describe(path), tiny=True) if case["name"] in SEVERAL_BUFFERS]
    results = measure_cases(path, cases, ZooEngine(Path(sys.executable), card="vulkan"), real=True)
    assert len(results) == len(SEVERAL_BUFFERS)
    narrow = Rig(
        tuple(
            replace(device, buffers=replace(device.buffers, largest_buffer_bytes=most_bytes)) for device in rig.devices
        ),
        rig.host,
    )
    found: list[str] = []
    for result in results:
        case = case_of(memory.model, {**DEFAULTS, **pack_case(result, "vulkan", "real")})
        found += _off(memory, replace(case, rig=_like(case.rig, narrow)))
    assert found == []


def _like(stand_ins: Rig, found: Rig) -> Rig:
    """Return the stand-ins with what this machine's device told of its buffers."""
    first = found.devices[0]

    def told(device: Device) -> Device:
        return replace(
            device,
            buffers=first.buffers,
        )

    return Rig(tuple(map(told, stand_ins.devices)), stand_ins.host)


def _off(memory: ModelMemory, case: TruthCase) -> list[str]:
    """Return what was not forecast to the byte."""
    devices = memory.estimate(case.layout, case.context, case.rig).devices
    found = []
    for device_id in case.rig.ids if case.compares_devices else (CPU_ID,):
        measured, expected = case.measured.get(device_id, Measured(0, 0, 0)), devices[device_id]
        state_bytes = expected.kv_cache_bytes + expected.recurrent_bytes
        excess_bytes = expected.compute_bytes - measured.compute_bytes
        if expected.weights_bytes + expected.mapped_bytes != measured.weights_bytes:
            found.append(f"{case.name}: weights of {device_id}")
        if state_bytes != measured.state_bytes:
            found.append(f"{case.name}: cache of {device_id}")
        if excess_bytes:
            found.append(f"{case.name}: compute buffer of {device_id}, {excess_bytes:+,} bytes")
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_every_layout_answers_as_the_cpu_does(name: str, models: dict[str, ModelMemory], rig: Rig) -> None:
    with _loaded(_plan(models[name], rig, _layout(*[CPU_ID] * _N_LAYERS), CONTEXT)) as (child, _):
        expected = _answer(child)
    assert expected
    for words, layout in LAYOUTS.items():
        plan = _plan(models[name], rig, layout, CONTEXT)
        with _loaded(plan) as (child, loaded):
            assert _differences(plan, loaded) == {}, words
            assert _answer(child) == expected, words


def _shared_out(*runs: tuple[str, int]) -> Layout:
    """Return a layout by places and how many layers each has."""
    return _layout(*(place for place, count in runs for _ in range(count)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("file_type", [name for name in FILE_TYPES if not name.endswith("_S")])
def test_a_real_model_of_each_type_is_forecast_to_the_byte(file_type: str, rig: Rig, tmp_path: Path) -> None:
    memory = ModelMemory(read_model(quantised(tmp_path, file_type)))
    for layout in (_shared_out((V0, 9), (V1, 10), (V2, 11)), _shared_out((CPU_ID, 5), (V1, 9), (CPU_ID, 4), (V0, 12))):
        plan = _plan(memory, rig, layout, CONTEXT)
        with _loaded(plan) as (_, loaded):
            assert _differences(plan, loaded) == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("file_type", ["Q4_0", "Q8_0"])
def test_a_real_model_answers_alike_on_one_device_and_on_three(file_type: str, rig: Rig, tmp_path: Path) -> None:
    memory = ModelMemory(read_model(quantised(tmp_path, file_type)))
    answers = []
    for layout in (_shared_out((V0, 30)), _shared_out((V0, 9), (V1, 10), (V2, 11))):
        with _loaded(_plan(memory, rig, layout, CONTEXT)) as (child, _):
            answers.append(_answer(child))
    assert len(answers[0].split()) > 3
    assert answers[0] == answers[1]


@pytest.mark.exhaustive
def test_two_processes_share_a_device(models: dict[str, ModelMemory], rig: Rig) -> None:
    plan = _plan(models["dense"], rig, LAYOUTS["one device"], CONTEXT)
    with _loaded(plan) as (first, _), _loaded(plan) as (second, loaded):
        assert _differences(plan, loaded) == {}
        assert _answer(first) == _answer(second)
