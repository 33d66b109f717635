"""The self-test of several runs on one device, tried on workers, and its stored results."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.base.engine_build import engine_version
from engine.base.errors import EngineError
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import Capabilities, Device, Rig, make_host
from engine.machines.rigs import self_test
from engine.machines.rigs.lab import LabRig
from engine.machines.rigs.self_test import SelfTest, keep_verdict, read_verdicts, with_verdicts
from engine.runtime.process.blocking_child import BlockingChild
from engine.runtime.protocol.messages import Message
from engine.runtime.protocol.requests import AnyRequest, Load, Logits
from tests.support.models import write_tiny_llama

CARD = Device("CUDA0", "card", "CUDA", "gpu", GIB)
RIG = Rig((CARD, replace(CARD, id="Vulkan0", backend="Vulkan")), make_host("host", GIB))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=8)


def test_a_worker_gives_the_same_logits_as_one_entry_and_as_five(model: Path) -> None:
    with LabRig([64 * MIB]) as lab:
        result = self_test.try_repeated(lab.rig, "RPC0", model)
    assert result == SelfTest(rounds=20, different=0)
    assert result.passed


def test_other_logits_fail_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = BlockingChild.ask
    loads: list[Load] = []

    def ask(child: BlockingChild, request: AnyRequest, answer_type: type[Message]) -> Message:
        if isinstance(request, Load):
            loads.append(request)
        elif isinstance(request, Logits) and len(loads) == 2 and len(request.tokens) % 2:
            request = Logits(tokens=(*request.tokens[:-1], 5))
        return honest(child, request, answer_type)

    monkeypatch.setattr(BlockingChild, "ask", ask)
    with LabRig([64 * MIB]) as lab:
        result = self_test.try_repeated(lab.rig, "RPC0", model, rounds=4)
    assert [load.parameters.devices for load in loads] == [("RPC0",), ("RPC0",) * 5]
    assert (result.rounds, result.passed) == (4, False)
    assert 0 < result.different <= 2


def test_a_device_without_room_is_an_error(tmp_path: Path) -> None:
    wide = write_tiny_llama(tmp_path / "wide.gguf", n_layers=4, n_embd=512, n_head=8, n_head_kv=8, n_ff=1536)
    with LabRig([4 * MIB]) as lab, pytest.raises(EngineError, match="RPC0 has too little free memory"):
        self_test.try_repeated(lab.rig, "RPC0", wide)


def test_a_verdict_holds_for_a_backend_and_a_version(tmp_path: Path) -> None:
    path = tmp_path / "self_test.json"
    path.write_text('{"version": 1, "passed": {"CUDA llama-cpp-python 0.0.1": true}}')
    assert not with_verdicts(RIG, read_verdicts(path)).devices[0].capabilities.repeatable
    keep_verdict(path, CARD, SelfTest(20, 0))
    assert read_verdicts(path) == {f"CUDA {engine_version()}": True}
    cuda, vulkan = with_verdicts(RIG, read_verdicts(path)).devices
    assert (cuda.capabilities.repeatable, vulkan.capabilities.repeatable) == (True, False)
    keep_verdict(path, CARD, SelfTest(20, 1))
    told = Rig((replace(CARD, capabilities=Capabilities(repeatable=True)),), RIG.host)
    assert not with_verdicts(told, read_verdicts(path)).devices[0].capabilities.repeatable
    assert with_verdicts(told, {}) == told


def test_verdicts_of_another_version_of_the_file_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "self_test.json"
    path.write_text(f'{{"version": 2, "passed": {{"CUDA {engine_version()}": true}}}}')
    assert read_verdicts(path) == {}


def test_a_damaged_file_holds_no_verdicts(tmp_path: Path) -> None:
    path = tmp_path / "self_test.json"
    assert read_verdicts(path) == {}
    path.write_bytes(b"\xff{")
    assert read_verdicts(path) == {}
