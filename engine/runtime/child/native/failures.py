"""Failures in the child: `RequestError` ends a request, `StepLimit` ends the process.

A grammar can keep llama.cpp busy without end for each token, and an RPC server with the number of its devices. Nothing
interrupts native code, so that the process ends. It sends the reason as `Aborting` before.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType

import msgspec

from engine.runtime.protocol.heartbeat import resident_bytes
from engine.runtime.protocol.messages import GAVE_UP_EXIT_CODE, AllocationFailure, Message
from engine.runtime.protocol.messages import Failure as FailureMessage


class RequestError(Exception):
    """Ends the current request. `message`: its final message to the parent."""

    def __init__(self, message: Message) -> None:
        super().__init__(str(message))
        self.message = message

    def message_for(self, request: int) -> Message:
        """Return the message with the id of a request to the loaded model."""
        if isinstance(self.message, FailureMessage | AllocationFailure):
            return msgspec.structs.replace(self.message, request=request)
        return self.message


def failure(kind: str, sentence: str) -> RequestError:
    """Return the error with a `Failure`. `kind`: a kind of error from docs/contract.md."""
    return RequestError(FailureMessage(kind=kind, message=sentence))


STEP_SECONDS = 10.0
"""Limit in processor time of this process, so that a busy machine does not matter."""
STEP_BYTES = 1 << 30
SIMPLER = "Make it simpler or empty it, then load the model again."
_LOOK_SECONDS = 0.2
_QUICK_STEPS_SECONDS = 1.0
"""Pause between looks while each of them sees another step."""


class StepLimit:
    """Ends the process if a native call takes too much processor time or memory. A context manager around each call.

    A thread of its own checks the limits; `close` ends it.

    `say`: sends the reason before the process ends. `what`: the input that is to blame. `remedy`: what to do about it.
    """

    def __init__(self, say: Callable[[str], None], what: str, remedy: str = SIMPLER) -> None:
        self._say, self._what, self._remedy = say, what, remedy
        self._begun: tuple[float, int] | None = None
        self._seen: tuple[float, int] | None = None
        self._awake = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="step-limit", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        self._begun = (time.process_time(), resident_bytes())
        if not self._awake.is_set():
            self._awake.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._begun = None

    def close(self) -> None:
        """End the thread, and wait for it."""
        self._ended.set()
        self._awake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            pause_s = self._look()
            if pause_s is None:
                self._awake.wait()
            else:
                self._ended.wait(pause_s)

    def _look(self) -> float | None:
        """Compare the step that runs with the limits; return the seconds until the next look, None: until a step."""
        begun, before = self._begun, self._seen
        self._seen = begun
        if begun is None:
            # First forgotten, then asked again: a step that begins in between sets it once more.
            self._awake.clear()
            return None if self._begun is None and not self._ended.is_set() else _LOOK_SECONDS
        begun_s, begun_bytes = begun
        if time.process_time() - begun_s > STEP_SECONDS:
            self._give_up(f"more than {STEP_SECONDS:g} s")
        elif resident_bytes() - begun_bytes > STEP_BYTES:
            self._give_up(f"more than {STEP_BYTES >> 30} GiB of memory")
        # While tokens come, each look sees another step: quick ones need no close watch.
        return _LOOK_SECONDS if begun is before else _QUICK_STEPS_SECONDS

    def _give_up(self, how_much: str) -> None:
        # os._exit, because the main thread is in native code and would never see an exception.
        self._say(f"The engine process ended itself because {self._what} took {how_much} for one step. {self._remedy}")
        os._exit(GAVE_UP_EXIT_CODE)
