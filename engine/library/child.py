"""`python -m engine.library.child`: reads headers and makes forecasts beside the window, one order in its life.

Both are Python from beginning to end: in a thread of the window they would hold up every frame. Files are strangers':
the process has no rights to write, and ends with its parent.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from engine.confinement import confine, refuse_core_files
from engine.errors import EngineError
from engine.library.orders import MAX_ORDER_BYTES, Order, PlanModels, ReadHeaders, path_of, read_frame, write_frame

HOLD_S = 0.05
"""Headers are told some at a time: the window wakes up for each frame."""
_MOST_HELD = 64
_NICENESS = 5


class Answers:
    """Sends what was found, held back for `hold_s` at most as long as more comes."""

    def __init__(self, stream: IO[bytes], hold_s: float) -> None:
        self._stream, self._hold_s = stream, hold_s
        self._held: list[tuple[int, Any]] = []
        self._sent_s = time.monotonic()

    def add(self, number: int, found: Any) -> None:
        """Tell what was found of a model."""
        self._held.append((number, found))
        if len(self._held) >= _MOST_HELD or time.monotonic() - self._sent_s >= self._hold_s:
            self._send()

    def end(self) -> None:
        """Say that this was all."""
        if self._held:
            self._send()
        self._send()

    def _send(self) -> None:
        write_frame(self._stream, self._held)
        self._held = []
        self._sent_s = time.monotonic()


def main() -> None:
    """Take one order, carry it out and end."""
    # An interrupt typed in the terminal reaches the whole group; the parent decides, and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    refuse_core_files()
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    data = read_frame(sys.stdin.buffer, MAX_ORDER_BYTES)
    if data is None:
        return
    order = msgspec.msgpack.decode(data, type=Order)
    confine(readable=(Path("/"),), writable=())
    threading.Thread(target=_end_with_parent, name="input", daemon=True).start()
    with suppress(BrokenPipeError):
        carry_out(order, sys.stdout.buffer)
    sys.stderr.flush()
    os._exit(0)


def carry_out(order: Order, stream: IO[bytes]) -> None:
    """Do what is ordered, writing what is found to `stream`."""
    match order:
        case ReadHeaders():
            answers = Answers(stream, HOLD_S)
            _read(order, answers)
        case PlanModels():
            answers = Answers(stream, 0.0)
            _plan(order, answers)
    answers.end()


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


def _end_with_parent() -> None:
    """Wait for the end of the input: the parent has gone, or wants no more."""
    sys.stdin.buffer.read(1)
    os._exit(0)


if __name__ == "__main__":
    main()
