"""Failures in the child: `RequestError` ends a request, `StepLimit` and `NodeLimit` end the process.

Some inputs keep llama.cpp busy without end: a grammar that is very slow to check, an RPC server that reports too many
devices, or a number in a model file that makes an operation of the graph endless. Nothing can interrupt native code, so
the process ends. Before that it sends the reason as `Aborting`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from engine.base.values import replace
from engine.runtime.protocol.heartbeat import current_use, resident_bytes
from engine.runtime.protocol.messages import GAVE_UP_EXIT_CODE, AllocationFailure, Message
from engine.runtime.protocol.messages import Failure as FailureMessage


class RequestError(Exception):
    """Error that ends the current request. `message`: the final message about the request to the parent."""

    def __init__(self, message: Message) -> None:
        super().__init__(str(message))
        self.message = message

    def message_for(self, request: int) -> Message:
        """Return the error's message to the parent. A failure (also of an allocation) gets the request id `request`."""
        if isinstance(self.message, FailureMessage | AllocationFailure):
            return replace(self.message, request=request)
        return self.message


def failure(kind: str, sentence: str) -> RequestError:
    """Return a `RequestError` with a `Failure`. `kind`: a kind of error from docs/contract.md."""
    return RequestError(FailureMessage(kind=kind, message=sentence))


STEP_SECONDS = 10.0
"""Default limit of `StepLimit`: processor time of a native call, in seconds.

Time that other processes use on a busy machine does not count.
"""
STEP_BYTES = 1 << 30
SIMPLER = "Simplify or clear it, then load the model again."
_LOOK_SECONDS = 0.2
_IDLE_LOOKS = 5


class StepLimit:
    """Ends the process if a native call takes too much processor time or memory.

    A context manager to use around each native call. A thread measures the resident memory during such calls.
    The system's resource limits are not suitable: drivers of graphics cards reserve hundreds of GiB of address space
    and map host memory as private memory, and if the system refuses memory llama.cpp ends the process without naming
    the file.

    `send_reason`: sends the reason before the process ends.
    `what`: name of the input that makes the call slow, for the message.
    `remedy`: advice to the user, as a sentence.
    `seconds`, `size_bytes`: the limits; None for `STEP_SECONDS` and `STEP_BYTES`.
    """

    def __init__(
        self,
        send_reason: Callable[[str], None],
        what: str,
        remedy: str = SIMPLER,
        *,
        seconds: float | None = None,
        size_bytes: int | None = None,
    ) -> None:
        self._send_reason, self._what, self._remedy = send_reason, what, remedy
        self._seconds, self._size_bytes = seconds, size_bytes
        self._begun: tuple[float, int] = 0.0, 0

    def __enter__(self) -> None:
        self._begun = (time.process_time(), resident_bytes())
        _watch.begin(self)

    def __exit__(self, *_: object) -> None:
        _watch.end()

    def look(self) -> None:
        """End the process if the running native call exceeds its limit of processor time or memory.

        Called in the thread of `_Watch`.
        """
        begun_s, begun_bytes = self._begun
        seconds = STEP_SECONDS if self._seconds is None else self._seconds
        size_bytes = STEP_BYTES if self._size_bytes is None else self._size_bytes
        if time.process_time() - begun_s > seconds:
            self._give_up(f"more than {seconds:.3g} s")
        elif resident_bytes() - begun_bytes > size_bytes:
            self._give_up(f"more than {size_bytes / (1 << 30):.2g} GiB of memory")

    def _give_up(self, how_much: str) -> None:
        # os._exit, because the main thread is in native code and would never see an exception.
        self._send_reason(
            f"The engine process ended itself because {self._what} took {how_much} for one step. {self._remedy}"
        )
        os._exit(GAVE_UP_EXIT_CODE)


class _Watch:
    """The thread that checks the limits of the running native call (`StepLimit`).

    It ends after a second without such a call. The next call starts it again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: StepLimit | None = None
        self._is_on = False
        self._stopped = threading.Event()

    def begin(self, step: StepLimit) -> None:
        self._running = step
        with self._lock:
            if not self._is_on:
                self._is_on = True
                threading.Thread(target=self._run, name="step-limit", daemon=True).start()

    def end(self) -> None:
        self._running = None

    def _run(self) -> None:
        idle = 0
        while True:
            self._stopped.wait(_LOOK_SECONDS)
            if (step := self._running) is not None:
                idle = 0
                step.look()
                continue
            idle += 1
            if idle < _IDLE_LOOKS:
                continue
            # Again, under the lock: `begin` may have set a step since, and starts no thread while `_is_on`.
            with self._lock:
                if self._running is None:
                    self._is_on = False
                    return


_watch = _Watch()
"""The only watching thread of this process. One is enough, because only the main thread makes calls with a limit."""


def advice_for_file(kind: str) -> str:
    """Return the advice to the user about a file that keeps a native call busy without end.

    `kind`: "model" or "projector".
    """
    return f"The {kind} file is damaged or manipulated; use another file of this {kind}."


NODE_SECONDS = 15.0
"""Default limit of `NodeLimit` in seconds. Any operation of a small graph ends within this time."""
SLOWEST_RATE = 1.5e8
"""Multiplications per second that any CPU core is assumed to reach; the limits of `NodeLimit` for large graphs use it.

Even slow cores do ten times as many with quantised weights.
"""


class NodeLimit:
    """Ends the process if one operation of a graph takes too long.

    A context manager to use around each computation of a graph. The progress is checked each second
    (`look_at_nodes`). The process ends only if an operation exceeds `seconds` both in elapsed time and in processor
    time. Elapsed time alone proves nothing on a busy machine. Processor time alone proves nothing either, because
    threads use it while they wait for others. Time in which the process reads files, allocates memory or uses the
    network does not count, because the disk may be slow.

    `send_reason`: sends the reason before the process ends.
    `name`: name of the file.
    `nodes`: returns a number that changes with each operation; None if the system cannot count them.
    `seconds`: the limit.
    `kind`: kind of the file, "model" or "projector".
    """

    def __init__(
        self,
        send_reason: Callable[[str], None],
        name: str,
        nodes: Callable[[], int | None],
        seconds: float = NODE_SECONDS,
        *,
        kind: str = "model",
    ) -> None:
        self._send_reason, self._name, self._nodes, self.seconds, self._kind = send_reason, name, nodes, seconds, kind
        self._calls = 0
        self._seen: tuple[int, int | None] | None = None
        self._use = current_use(with_network=False)
        self._begun: tuple[float, float] = 0.0, 0.0

    def __enter__(self) -> None:
        # Once for each token, so that it must cost nothing.
        self._calls += 1
        _computing[:] = [self]

    def __exit__(self, *_: object) -> None:
        _computing.clear()

    def look(self) -> None:
        """End the process if one operation of the running computation takes longer than `seconds`.

        Called each second in the thread that also sends the heartbeat to the parent.
        """
        now, use = (time.monotonic(), time.process_time()), current_use()
        seen = self._calls, self._nodes()
        reads = replace(use, cpu_seconds=self._use.cpu_seconds).shows_work_since(self._use)
        self._use = use
        if seen != self._seen or reads:
            self._seen, self._begun = seen, now
            return
        if all(after - before > self.seconds for after, before in zip(now, self._begun, strict=True)):
            self._send_reason(
                f"The engine process ended itself because one operation of {self._name} took more than "
                f"{self.seconds:.3g} s. {advice_for_file(self._kind)}"
            )
            os._exit(GAVE_UP_EXIT_CODE)


_computing: list[NodeLimit] = []
"""The limit of the running computation; empty if none runs.

The main thread sets it; the heartbeat's thread reads it.
"""


def look_at_nodes() -> None:
    """End the process if an operation of the running computation exceeds its time limit (`NodeLimit`).

    Do nothing if no computation runs.
    """
    for limit in tuple(_computing):
        limit.look()
