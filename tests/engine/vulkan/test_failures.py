"""Failing Vulkan devices: the error of each fault, and a working next load. Faults are injected below the engine."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from engine.devices.device import Rig
from engine.model.gguf.reader import read_model
from engine.planning.fit.proposals import propose
from engine.planning.layout.layout import single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.plan_requests import load_request
from engine.runtime.protocol.messages import AllocationFailure, Failure, LoadedModel
from engine.runtime.protocol.requests import Generate
from engine.runtime.session.events import Failed
from engine.runtime.session.reports import crash_event, out_of_memory_event
from tests.engine.vulkan.conftest import LONGEST_S, V0
from tests.support.conversation import ChildEndedError, Conversation
from tests.support.faulty_children import build_preload
from tests.support.models import write_tiny_llama

pytestmark = pytest.mark.engine("vulkan")

CONTEXT = ContextSettings(n_ctx=512, n_batch=256, n_ubatch=128, threads=2, threads_batch=2)

_LONG = 262_144
"""Tokens whose cache is large beside what the driver takes for itself."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_preload("faulty_gpu", tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, rig: Rig) -> Plan:
    path = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=2, n_embd=128, n_head=4, n_ff=256)
    return Plan(ModelMemory(read_model(path)), rig, Edit(single_device(2, V0), CONTEXT))


def _faulty(patch: pytest.MonkeyPatch, library: Path, fault: str, **others: str) -> None:
    """Have children that start from now on see a device with this fault."""
    variables = {"LD_PRELOAD": str(library), "FAULTY_GPU_FAULT": fault} | others
    for name, value in variables.items():
        patch.setenv(name, value)


def _loads(plan: Plan) -> bool:
    with Conversation() as child:
        return isinstance(child.ask(load_request(plan), LONGEST_S), LoadedModel)


def test_memory_that_a_device_refuses_is_told_with_device_stage_and_bytes(
    plan: Plan, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights_bytes = next(row.weights_bytes for row in plan.forecast if row.id == V0)
    with monkeypatch.context() as patch:
        _faulty(patch, library, "memory", FAULTY_GPU_ROOM=str(weights_bytes - 1))
        with Conversation() as child:
            told = child.ask(load_request(plan), LONGEST_S)
    assert isinstance(told, AllocationFailure), told
    assert (told.stage, told.device, told.requested_bytes) == ("allocate", V0, weights_bytes)
    assert _loads(plan)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts all private memory in RLIMIT_DATA")
def test_a_child_that_gets_no_more_memory_names_the_device_and_what_would_fit(plan: Plan) -> None:
    """A driver without a card takes its memory from the process: real refusals, with nothing between it and the
    engine. What is forecast to fit does not, as where another program took the memory meanwhile."""
    long = Plan(plan.memory, plan.rig, Edit(plan.edit.layout, msgspec.structs.replace(CONTEXT, n_ctx=_LONG)))
    cache_bytes = next(row.kv_cache_bytes for row in long.forecast if row.id == V0)
    with Conversation() as child:
        # What the driver itself needs is taken by then.
        assert isinstance(child.ask(load_request(plan), LONGEST_S), LoadedModel)
        used_bytes = psutil.Process(child.pid).memory_info().data
        psutil.Process(child.pid).rlimit(psutil.RLIMIT_DATA, (used_bytes + cache_bytes // 2,) * 2)
        told = child.ask(load_request(long), LONGEST_S)
    assert isinstance(told, AllocationFailure), told
    assert (told.stage, told.device, told.requested_bytes) == ("context", V0, cache_bytes)
    event = out_of_memory_event(long.rig, told)
    assert event.device == V0
    first, *_ = propose(long, {V0: cache_bytes // 2})
    assert first.edit.layout != long.edit.layout
    assert first.edit.context == long.edit.context
    assert _loads(plan)


def test_a_device_that_is_lost_in_a_load_is_not_taken_for_a_fault_of_the_file(
    plan: Plan, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _faulty(patch, library, "lost")
        with Conversation() as child:
            told = child.ask(load_request(plan), LONGEST_S)
    assert isinstance(told, Failure), told
    assert told.kind == "unreachable"
    assert "was lost while reading tiny.gguf" in told.message
    assert _loads(plan)


def test_a_device_that_is_lost_amid_an_answer_is_named(
    plan: Plan, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    when = tmp_path / "now"
    with monkeypatch.context() as patch:
        _faulty(patch, library, "lost", FAULTY_GPU_WHEN=str(when))
        with Conversation() as child:
            assert isinstance(child.ask(load_request(plan), LONGEST_S), LoadedModel)
            when.touch()
            with pytest.raises(ChildEndedError) as ended:
                child.ask(Generate(id=1, prompt="Once", max_tokens=12, temperature=0.0), LONGEST_S)
    event = crash_event(ended.value.outcome)
    assert isinstance(event, Failed)
    assert event.kind == "unreachable"
    assert event.message.startswith(f"{V0} was lost while the device was in use: ")
    assert _loads(plan)
