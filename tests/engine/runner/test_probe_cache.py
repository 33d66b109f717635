"""The cache of probes: the same question, a changed file, and how much it keeps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from engine.devices.device import CPU_ID, Rig, make_host
from engine.fit.report import DeviceRow, make_row
from engine.gguf.reader import read_model
from engine.layout.context_settings import ContextSettings
from engine.layout.layout import single_device
from engine.memory import model_memory
from engine.memory.estimate import DeviceMemory, Grade, MemoryEstimate
from engine.runner.host import host_device
from engine.runner.job import LoadJob
from engine.runner.one_shot import Questions
from engine.runner.probe import ProbeRun, Probes
from engine.runner.probe_cache import ProbeCache
from engine.runner.protocol import OFFLOAD_VARIABLE
from engine.runner.spare import SpareChild
from engine.units import GIB, MIB
from tests.support.jobs import N_LAYERS, made_up_model
from tests.support.models import write_tiny_llama

CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64)


@pytest.fixture
def job(tmp_path: Path) -> LoadJob:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x" * 100)
    rig = Rig((), make_host("host", 8 * GIB, 8 * GIB))
    return LoadJob(made_up_model(path), rig, single_device(N_LAYERS, CPU_ID), CONTEXT)


def rows(job: LoadJob, weights_bytes: int = 7) -> tuple[DeviceRow, ...]:
    return (make_row(job.rig.host, DeviceMemory(weights_bytes=weights_bytes), Grade.PROBED),)


def test_the_same_question_has_the_same_answer_against_the_memory_of_now(job: LoadJob) -> None:
    cache = ProbeCache()
    assert cache.find(job) is None
    cache.keep(job, rows(job))
    assert cache.find(job) == rows(job)
    other_threads = replace(job, context=msgspec.structs.replace(CONTEXT, threads=3))
    assert cache.find(other_threads) == rows(job)
    fuller = replace(job, rig=Rig((), make_host("host", 8 * GIB, GIB)))
    found = cache.find(fuller)
    assert found is not None
    assert (found[0].weights_bytes, found[0].free_bytes, found[0].grade) == (7, GIB, Grade.PROBED)


def test_other_settings_and_a_changed_file_are_other_questions(job: LoadJob) -> None:
    cache = ProbeCache()
    cache.keep(job, rows(job))
    assert cache.find(replace(job, context=msgspec.structs.replace(CONTEXT, n_ctx=512))) is None
    (path,) = job.model.paths
    path.write_bytes(b"x" * 101)
    assert cache.find(job) is None
    path.unlink()
    assert cache.find(job) is None
    cache.keep(job, rows(job))
    assert cache.find(job) is None


def test_the_least_used_goes_first(job: LoadJob) -> None:
    cache = ProbeCache(capacity=2)
    jobs = [replace(job, context=msgspec.structs.replace(CONTEXT, n_ctx=256 * (1 + number))) for number in range(3)]
    cache.keep(jobs[0], rows(job))
    cache.keep(jobs[1], rows(job))
    assert cache.find(jobs[0]) is not None
    cache.keep(jobs[2], rows(job))
    assert [cache.find(each) is not None for each in jobs] == [True, False, True]


def test_a_second_probe_needs_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_model(write_tiny_llama(tmp_path / "tiny.gguf"))
    rig, layout, cache = Rig((), host_device()), single_device(model.n_layers, CPU_ID), ProbeCache()
    first = ProbeRun(model, rig, layout, CONTEXT, cache).run()
    assert {row.grade for row in first.rows} == {Grade.PROBED}

    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a child was asked")

    monkeypatch.setattr("engine.runner.spare.Questions", refuse)
    assert ProbeRun(model, rig, layout, CONTEXT, cache).run() == first


def test_a_forecast_that_is_far_off_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def far_off(*_arguments: object) -> MemoryEstimate:
        return MemoryEstimate({CPU_ID: DeviceMemory(weights_bytes=500 * MIB)}, Grade.ESTIMATED)

    model = read_model(write_tiny_llama(tmp_path / "tiny.gguf"))
    layout, rig = single_device(model.n_layers, CPU_ID), Rig((), host_device())
    with caplog.at_level(logging.WARNING):
        ProbeRun(model, rig, layout, CONTEXT).run()
        assert caplog.records == []
        monkeypatch.setattr(model_memory.ModelMemory, "estimate", far_off)
        ProbeRun(model, rig, layout, CONTEXT).run()
    (record,) = caplog.records
    assert record.name == "layerdeck.defects"
    assert str(tmp_path) not in record.getMessage()


def test_a_chosen_threshold_has_a_child_of_its_own(tmp_path: Path) -> None:
    model = read_model(write_tiny_llama(tmp_path / "m.gguf", n_layers=4))
    rig, layout = Rig((), make_host("host", 8 * GIB)), single_device(4, CPU_ID)
    wanted: list[Mapping[str, str]] = []

    class Spare(SpareChild):
        def take(self, environment: Mapping[str, str] | None = None) -> Questions:
            wanted.append(environment or {})
            return super().take(environment)

    spare = Spare(timeout_s=60.0)
    chosen = msgspec.structs.replace(CONTEXT, op_offload_min_batch=96)
    with Probes(spare=spare) as probes:
        for context in (CONTEXT, CONTEXT, chosen, chosen):
            probes.rows(LoadJob(model, rig, layout, context))
    spare.close()
    assert wanted == [{}, {OFFLOAD_VARIABLE: "96"}]
