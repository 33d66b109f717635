"""How work ends early: a request by an exception that carries its last message, the process by a limit on one step.

A grammar can keep the engine busy without end with every token, an RPC server with the devices that it says it has, and
nothing interrupts it in native code. The parent then hears why from the last word.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType

import msgspec

from engine.runtime.protocol.effort import resident_bytes
from engine.runtime.protocol.messages import GAVE_UP_EXIT_CODE, AllocationFailure, Message
from engine.runtime.protocol.messages import Failure as FailureMessage


class EndOfRequest(Exception):
    """Ends the request that is running; `message` is what the parent is told."""

    def __init__(self, message: Message) -> None:
        super().__init__(str(message))
        self.message = message

    def word_of(self, request: int) -> Message:
        """Return the message as the last word of the request with this id."""
        if isinstance(self.message, FailureMessage | AllocationFailure):
            return msgspec.structs.replace(self.message, request=request)
        return self.message


def failure(kind: str, sentence: str) -> EndOfRequest:
    """Return the end with a `Failure`. `kind` is one of the contract's words."""
    return EndOfRequest(FailureMessage(kind=kind, message=sentence))


STEP_SECONDS = 10.0
"""Of this process's own processor time: a busy machine gives it as long as it needs."""
STEP_BYTES = 1 << 30
SIMPLER = "Make it simpler or empty it, then load the model again."
_LOOK_SECONDS = 0.2


class StepLimit:
    """A context manager for each step; `close` ends the thread that looks. `say` gets the last word, which names `what`
    was given up and ends with `remedy`."""

    def __init__(self, say: Callable[[str], None], what: str, remedy: str = SIMPLER) -> None:
        self._say, self._what, self._remedy = say, what, remedy
        self._begun: tuple[float, int] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="step-limit", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        self._begun = (time.process_time(), resident_bytes())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._begun = None

    def close(self) -> None:
        """Look no more; returns when nobody does."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            if (begun := self._begun) is None:
                continue
            begun_s, begun_bytes = begun
            if time.process_time() - begun_s > STEP_SECONDS:
                self._give_up(f"more than {STEP_SECONDS:g} s")
            elif resident_bytes() - begun_bytes > STEP_BYTES:
                self._give_up(f"more than {STEP_BYTES >> 30} GiB of memory")

    def _give_up(self, how_much: str) -> None:
        self._say(f"The engine process was given up because {self._what} took {how_much} for one step. {self._remedy}")
        os._exit(GAVE_UP_EXIT_CODE)
