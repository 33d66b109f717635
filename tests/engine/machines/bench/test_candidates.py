"""Candidates of a speed comparison: layouts of the strategies, and other settings of a layout."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.base.cancellation import CancelToken
from engine.base.errors import CancelledError
from engine.devices.device import CPU_ID
from engine.machines.bench.candidates import BUSY_LOAD, Predictor, settings_candidates, strategy_candidates
from engine.model.gguf.reader import read_model
from engine.planning.fit.speed_book import EMPTY_BOOK
from engine.planning.layout.layout import make_layout, single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from tests.support.bench import PRESET, measured
from tests.support.models import write_header_only
from tests.support.previews import make_gpu, make_rig

RIG = make_rig(make_gpu("CUDA0", 24), make_gpu("CUDA1", 24))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = tmp_path_factory.mktemp("models") / "eight.gguf"
    memory = ModelMemory(read_model(write_header_only(path, n_layers=8, n_embd=1024, n_head=8, n_ff=4096)))
    return Plan(memory, RIG, Edit(single_device(8, "CUDA0"), ContextSettings(n_ctx=4096)))


def words(plan: Plan, prompt_tokens: int = 512) -> list[str]:
    preset = msgspec.structs.replace(PRESET, prompt_tokens=prompt_tokens)
    return [each.name.removeprefix("x, ") for change in settings_candidates(preset) for each in change("x", plan)]


def test_strategies_give_layouts_that_fit_and_differ(plan: Plan) -> None:
    found = strategy_candidates(plan, EMPTY_BOOK, CancelToken())
    layouts = [each.plan.edit.layout for each in found]
    assert plan.edit.layout not in layouts
    assert len(set(layouts)) == len(layouts) > 0
    assert all(each.plan.report.fits and each.reason for each in found)
    assert any(len(set(layout.devices)) == 2 for layout in layouts), "a split is a candidate, too"


def test_a_cancelled_search_ends(plan: Plan) -> None:
    cancel = CancelToken()
    cancel.cancel()
    with pytest.raises(CancelledError):
        strategy_candidates(plan, EMPTY_BOOK, cancel)


def test_settings_are_those_that_matter_to_the_layout(plan: Plan) -> None:
    one = words(plan)
    assert one == ["flash attention off", "micro batch 128", "micro batch 256"], "of prompts of 512 tokens"
    two = words(plan.with_layout(make_layout(8, ["CUDA0"] * 4 + ["CUDA1"] * 4)))
    assert two[0] in ("pipeline parallelism on", "pipeline parallelism off")
    host = words(plan.with_layout(make_layout(8, [CPU_ID] * 4 + ["CUDA0"] * 4)))
    sizes = [f"op offload for batches of at least {count} tokens" for count in (8, 128, 1024)]
    assert host[:4] == [*sizes, "no op offload"]
    assert "micro batch 2048" in words(plan, 4096)


def test_predictions_follow_what_was_learnt(plan: Plan) -> None:
    predictor = Predictor(EMPTY_BOOK, PRESET)
    before = predictor.per_second(plan)
    assert before is not None
    predictor.learn(plan, measured("x", [before / 2] * 5))
    assert predictor.per_second(plan) == pytest.approx(before / 2, rel=0.02)


def test_a_busy_machine_teaches_nothing(plan: Plan) -> None:
    predictor = Predictor(EMPTY_BOOK, PRESET)
    found = measured("x", [3.0] * 5)
    samples = tuple(msgspec.structs.replace(each, other_load=2 * BUSY_LOAD) for each in found.samples)
    predictor.learn(plan, msgspec.structs.replace(found, samples=samples))
    assert predictor.book == EMPTY_BOOK


def test_a_model_that_only_a_probe_knows_has_no_prediction(plan: Plan, tmp_path: Path) -> None:
    broken = plan.with_layout(single_device(8, "CUDA9"))
    assert Predictor(EMPTY_BOOK, PRESET).answer_s(broken) is None
