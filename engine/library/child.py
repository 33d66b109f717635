"""`python -m engine.library.child`: reads headers and makes forecasts, one request in its life.

Both are Python from beginning to end: in a thread of the window they would hold up every frame. Files are strangers':
the process has no rights to write, and ends with its parent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.library.orders import AllFound, FactsFound, FitsFound, Order, PlanModels, ReadHeaders, Working, path_of
from engine.protocol.effort import WorkTicks
from engine.protocol.messages import Message
from engine.protocol.pipe import Limits, limit_work, run_child

HOLD_S = 0.05
"""Headers are sent some at a time: the window wakes up for each message."""
WORK_S = 900.0
"""Of this process's processor time without an answer: longer than any forecast."""
_MOST_HELD = 64
_NICENESS = 5


class Answers:
    """Sends what was found, held back for `hold_s` at most as long as more comes."""

    def __init__(self, send: Callable[[Any], None], hold_s: float) -> None:
        self._send, self._hold_s = send, hold_s
        self._held: list[tuple[int, Any]] = []
        self._sent_s = time.monotonic()

    def add(self, number: int, found: Any) -> None:
        """Send what was found of a model, soon."""
        limit_work(WORK_S)
        self._held.append((number, found))
        if len(self._held) >= _MOST_HELD or time.monotonic() - self._sent_s >= self._hold_s:
            self.flush()

    def flush(self) -> None:
        """Send what is held back."""
        if self._held:
            self._send(tuple(self._held))
        self._held = []
        self._sent_s = time.monotonic()


def main() -> None:
    """Carry out one request."""
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    run_child(Order, lambda _order: Limits(readable=(Path("/"),)), carry_out)


def carry_out(order: Order, send: Callable[[Message], None]) -> None:
    """Do what is ordered, sending what is found."""
    limit_work(WORK_S)
    with WorkTicks(lambda: send(Working())):
        match order:
            case ReadHeaders():
                answers = Answers(lambda found: send(FactsFound(found=found)), HOLD_S)
                _read(order, answers)
            case PlanModels():
                answers = Answers(lambda found: send(FitsFound(found=found)), 0.0)
                _plan(order, answers)
        answers.flush()
    send(AllFound())


def _read(order: ReadHeaders, answers: Answers) -> None:
    from engine.library.facts import read_many

    wanted = (tuple(map(path_of, model)) for model in order.models)
    read_many(enumerate(wanted), answers.add)


def _plan(order: PlanModels, answers: Answers) -> None:
    from engine.gguf.reader import read_model
    from engine.library.fitting import find_fit, unknown_fit

    for number, encoded in enumerate(order.models):
        try:
            fit = find_fit(read_model(path_of(encoded)), order.rig, order.strategy, order.constraints)
        except EngineError as error:
            fit = unknown_fit(error)
        answers.add(number, fit)


if __name__ == "__main__":
    main()
