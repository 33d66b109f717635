"""The speed comparison with the real engine: a small model on the CPU."""

from __future__ import annotations

import msgspec
import pytest

from engine.base.cancellation import CancelToken
from engine.devices.device import CPU_ID, Rig, make_host
from engine.machines.bench.candidates import BUSY_LOAD, Candidate
from engine.machines.bench.results import Preset
from engine.machines.bench.run import BenchRequest, run_benchmark
from engine.machines.bench.runner import BenchProgress
from engine.model.gguf.reader import read_model
from engine.planning.fit.speed_book import EMPTY_BOOK
from engine.planning.layout.layout import single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from tests.support.models import write_tiny_llama

PRESET = Preset("test", 5, 80, 24, (0, 128))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = write_tiny_llama(tmp_path_factory.mktemp("models") / "m.gguf", n_layers=4)
    rig = Rig((), make_host("host", 8 << 30, 8 << 30))
    context = ContextSettings(n_ctx=1024, threads=1, threads_batch=1)
    return Plan(ModelMemory(read_model(path)), rig, Edit(single_device(4, CPU_ID), context))


def nothing(_progress: BenchProgress) -> None: ...


def test_two_layouts_are_measured_and_teach(plan: Plan) -> None:
    other = plan.with_edit(Edit(plan.edit.layout, msgspec.structs.replace(plan.edit.context, n_ubatch=128)))
    request = BenchRequest((Candidate("one", plan), Candidate("two", other)), PRESET)
    results, book = run_benchmark(request, EMPTY_BOOK, CancelToken(), nothing)
    one, two = results.layouts
    for layout in (one, two):
        assert layout.depths == (0, 128)
        assert len(layout.samples) == 10
        assert all(each.prompt_per_second and each.first_token_s for each in layout.samples)
        # The text of a prompt has about as many tokens as asked for; those of the depth are cached.
        assert all(60 <= each.prompt_tokens <= 160 for each in layout.samples), layout.samples
        assert layout.memory[0].device == CPU_ID
        assert layout.memory[0].measured_bytes
    assert {each.measure for each in results.comparisons} == {"prompt", "generation", "first_token", "answer", "load"}
    assert results.answers[0].same, "the same computation gives the same answers"
    is_busy = [(each.other_load or 0) > BUSY_LOAD for each in (one, two)]
    assert len(book.answers) == is_busy.count(False), "nothing is learnt while other programs compute"


def test_a_cancelled_comparison_leaves_no_child(plan: Plan) -> None:
    cancel = CancelToken()

    def tell(progress: BenchProgress) -> None:
        if progress.done == 1:
            cancel.cancel()

    results, _ = run_benchmark(BenchRequest((Candidate("one", plan),), PRESET), EMPTY_BOOK, cancel, tell)
    assert "cancelled" in results.ended
    assert len(results.layouts[0].samples) == 2
