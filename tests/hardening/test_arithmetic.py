"""Headers that our arithmetic does not cover: left to a probe, in bounded time."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from engine.base.cancellation import CancelToken
from engine.base.errors import CancelledError, EngineError
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.model_file import ModelFile, group_blocks
from engine.model.gguf.reader import read_model
from engine.planning.fit.strategies.catalogue import auto_layout
from engine.planning.layout.layout import Layout, make_layout
from engine.planning.memory import model_memory
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.work_limit import TooMuchWorkError, check_limits, limited
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.plan_document import plan_document
from engine.planning.settings.context_settings import ContextSettings
from tests.support.headers import write_with_hole
from tests.support.mutation import Header, mutate_header
from tests.support.selection import examples
from tests.support.truth import truth_model

HEADERS = sorted((Path(__file__).parents[1] / "zoo" / "headers").iterdir())
RIG = Rig(
    (Device("CUDA0", "", "CUDA", "gpu", 24 << 30), Device("CUDA1", "", "CUDA", "gpu", 8 << 30)), make_host("", 64 << 30)
)
CONTEXT = ContextSettings(n_ctx=4096)


def layout_of(model: ModelFile) -> Layout:
    n_layers = model.n_layers
    places = [CPU_ID if layer < n_layers // 4 else "CUDA0" for layer in range(n_layers)]
    return make_layout(n_layers, places, "CUDA0")


def without(model: ModelFile, stem: str) -> ModelFile:
    """Return the model without the tensors of a kind."""
    tensors = tuple(tensor for tensor in model.tensors if stem not in tensor.name)
    assert len(tensors) < len(model.tensors)
    blocks, outside = group_blocks(tensors, model.n_layers)
    return replace(model, tensors=tensors, blocks=blocks, global_tensors=outside)


@pytest.mark.parametrize(
    ("name", "stem"),
    [("minimax-m3-moe", "indexer.q_proj"), ("arwkv7-dense", "time_mix_v0"), ("rwkv7-dense", "time_mix_v0")],
)
def test_a_model_that_lacks_what_all_of_its_kind_have_is_left_to_the_engine(name: str, stem: str) -> None:
    model = without(truth_model(name), stem)
    plan = Plan(ModelMemory(model), RIG, Edit(layout_of(model), CONTEXT))
    assert plan.report.probe_only is not None
    assert "known only after a probe" in plan.report.probe_only
    assert sum(row.weights_bytes for row in plan.forecast) > 0


def test_what_takes_too_long_is_left_to_the_engine_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = truth_model("llama-dense")
    memory = ModelMemory(model)
    assert memory.probe_only is None
    with limited(0.0):
        monkeypatch.setattr("engine.planning.memory.work_limit._CALLS_PER_CHECK", 1)
        found = memory.estimate(layout_of(model), CONTEXT, RIG)
    assert found.unknown == ("compute",)
    assert "too large for a forecast" in (found.probe_only or "")
    asked: list[object] = []
    monkeypatch.setattr(model_memory, "limited", asked.append)
    assert memory.estimate(layout_of(model), CONTEXT, RIG) == found
    assert asked == []


def test_a_forecast_that_nobody_waits_for_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.planning.memory.work_limit._CALLS_PER_CHECK", 1)
    model, token = truth_model("llama-dense"), CancelToken()
    memory = ModelMemory(model)
    token.cancel()
    with pytest.raises(CancelledError), limited(60.0, lambda: token.cancelled):
        memory.estimate(layout_of(model), CONTEXT, RIG)
    assert memory.estimate(layout_of(model), CONTEXT, RIG) == ModelMemory(model).estimate(
        layout_of(model), CONTEXT, RIG
    )


def test_a_search_that_takes_too_long_ends_with_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.planning.memory.work_limit._CALLS_PER_CHECK", 1)
    monkeypatch.setattr("engine.planning.fit.strategies.catalogue.SEARCH_SECONDS", 0.0)
    memory = ModelMemory(truth_model("llama-dense"))
    found = auto_layout("fewest", memory, RIG, CONTEXT)
    assert found.layout.n_layers == memory.model.n_layers
    assert memory.unknown == ("compute",)


def test_an_outer_limit_holds_within_an_inner_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.planning.memory.work_limit._CALLS_PER_CHECK", 1)
    with limited(0.0), limited(60.0), pytest.raises(TooMuchWorkError):
        check_limits()
    for _ in range(5):
        check_limits()


def _read(path: Path) -> ModelFile | None:
    try:
        return read_model(path)
    except EngineError:
        return None


def _plan(model: ModelFile, numbers: random.Random) -> None:
    context = ContextSettings(n_ctx=numbers.choice((512, 8192)), flash_attn=numbers.choice(("auto", "on", "off")))
    memory = ModelMemory(model)
    plan = Plan(memory, RIG, Edit(layout_of(model), context))
    plan_document(plan)
    if numbers.random() < 0.2:
        auto_layout("fewest", memory, RIG, context)


@pytest.mark.parametrize("part", range(2))
def test_a_header_with_anything_changed_is_planned_or_refused(tmp_path: Path, part: int) -> None:
    n_planned = 0
    for seed in range(part * 100_000, part * 100_000 + examples(160)):
        numbers = random.Random(seed)
        header = Header(gzip.decompress(numbers.choice(HEADERS).read_bytes()))
        for _ in range(numbers.choice((1, 1, 1, 2, 3))):
            mutate_header(header, numbers)
        data = header.encode()
        path = write_with_hole(tmp_path / "m.gguf", data, min(len(data) + 64 + header.size_bytes, 1 << 43))
        model = _read(path)
        if model is not None:
            with limited(60.0):
                _plan(model, numbers)
            n_planned += 1
    assert n_planned > 0
