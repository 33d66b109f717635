"""What is told where a Vulkan device fails, and that the next load works. Faults stand between engine and driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.devices.device import Rig
from engine.gguf.reader import read_model
from engine.layout.layout import single_device
from engine.memory.model_memory import ModelMemory
from engine.plan.edit import Edit
from engine.plan.plan import Plan
from engine.plan.requests import load_request
from engine.protocol.messages import AllocationFailure, Failure, Generate, LoadedModel
from engine.session.events import Failed
from engine.session.reports import crash_event
from engine.settings.context_settings import ContextSettings
from tests.engine.vulkan.conftest import LONGEST_S, V0
from tests.support.conversation import ChildEndedError, Conversation
from tests.support.faulty_children import build_preload
from tests.support.models import write_tiny_llama

pytestmark = pytest.mark.engine("vulkan")

CONTEXT = ContextSettings(n_ctx=512, n_batch=256, n_ubatch=128, threads=2, threads_batch=2)


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
    assert event.message.startswith(f"{V0} was lost while it was in use: ")
    assert _loads(plan)
