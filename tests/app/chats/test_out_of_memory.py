"""Memory that runs out during an answer: the model is loaded with another layout, and the answer continues."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from PySide6.QtCore import QTimer

from app.models.loading import RequestLost
from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.device import device_key
from engine.runtime.process.child import ChildProcess
from engine.runtime.process.outcome import ProcessOutcome
from engine.runtime.protocol.requests import AnyRequest, Generate
from engine.runtime.session.status import Phase
from tests.app.chats.bench import Bench

BENCH: dict[str, Any] = {"settings": {"max_tokens": 3000, "seed": 1, "temperature": 0.0}}


def test_an_answer_goes_on_in_the_layout_that_fits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made, sent = ChildProcess._make_outcome, ChildProcess.send

    def exhausted(child: ChildProcess, *arguments: Any) -> ProcessOutcome:
        outcome = made(child, *arguments)
        return outcome if outcome.signal is None else replace(outcome, refusing_device="RPC0", free_bytes=MIB)

    def send(child: ChildProcess, message: AnyRequest) -> None:
        if isinstance(message, Generate):
            assert child.pid is not None
            asked.append(child.pid)
        sent(child, message)

    asked: list[int] = []
    monkeypatch.setattr(ChildProcess, "send", send)
    monkeypatch.setattr(ChildProcess, "_make_outcome", exhausted)
    bench.desk.settings.steps_back = True
    bench.start_lab()
    bench.load("RPC0", "RPC0", n_ctx=4096)
    bench.conversation.send("Tell me a long story.")
    bench.wait(lambda: bool("".join(bench.painted).strip()))
    os.kill(asked[0], signal.SIGKILL)
    bench.wait(lambda: bench.model.loading.loaded is None)
    written = bench.path[-1]
    bench.wait(lambda: bench.model.loading.phase is Phase.ANSWERING and bench.conversation.is_answering)
    assert bench.model.loading.loaded is not None
    assert bench.model.loading.loaded.edit.layout.assignment() != ("RPC0", "RPC0")
    bench.conversation.answering.stop()
    answer = bench.answered()
    assert answer.id == written.id
    assert answer.content.startswith(written.content)
    assert answer.state == "stopped"
    rig = bench.desk.rig.live.rig
    assert [need.device for need in rig.devices[0].computing] == [device_key(rig.devices[0])]


def test_the_loss_of_a_programs_answer_continues_no_answer_that_had_failed_before(bench: Bench) -> None:
    bench.load()
    conversation, loading = bench.conversation, bench.model.loading
    conversation.send("Tell me a long story.")
    run = conversation.answering.answer
    assert run is not None
    conversation.answering._do(run, run.fail("a file is missing"))
    assert not conversation.is_answering
    bench.wait(lambda: loading.phase is Phase.READY)
    asked: list[bool] = []
    conversation.answering.begun.connect(lambda: asked.append(True))
    loading.request_lost.emit(RequestLost(1 << 20, "Memory ran out.", goes_on=True))
    loading.phase_changed.emit(Phase.READY)
    turned: list[bool] = []
    QTimer.singleShot(0, lambda: turned.append(True))
    bench.wait(lambda: bool(turned))
    assert asked == []
