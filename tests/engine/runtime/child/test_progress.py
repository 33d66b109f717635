"""Progress while the engine reports nothing: ticks are sent only while it works."""

from __future__ import annotations

import math
import queue
import time

from engine.runtime.child.load.warm_up import StageReporter
from engine.runtime.protocol.messages import Message, StageProgress
from tests.support.patience import DEADLINE_S


def test_a_busy_stage_ticks_with_what_is_known() -> None:
    heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
    with StageReporter(heard.put, tick_seconds=0.25) as reporter:
        reporter.enter("context")
        reporter.name_device("W0")
        assert [heard.get(), heard.get()] == [
            StageProgress(stage="context"),
            StageProgress(stage="context", device="W0"),
        ]
        deadline = time.monotonic() + DEADLINE_S
        while heard.empty() and time.monotonic() < deadline:
            math.factorial(2000)
        assert heard.get(timeout=1) == StageProgress(stage="context", device="W0")


def test_small_steps_are_not_told_and_the_end_is() -> None:
    heard: list[Message] = []
    with StageReporter(heard.append, tick_seconds=DEADLINE_S) as reporter:
        reporter.enter("read", 0.0)
        for step in range(1000):
            reporter.advance(step / 100_000)
        reporter.advance(1.0)
    fractions = [message.fraction for message in heard if isinstance(message, StageProgress)]
    assert fractions == [0.0, 1.0]
