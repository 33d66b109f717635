"""Asking a child questions: one that is started for them, one that waits ahead of time, one that stays."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from engine.base.cancellation import CancelToken
from engine.base.errors import (
    ArgumentError,
    BusyError,
    EngineError,
    LayoutError,
    ModelFileError,
    RigError,
    UnreachableError,
    WorkerCrashedError,
    WorkerStalledError,
)
from engine.base.language import tr
from engine.base.programs import child_argv
from engine.runtime.process.child import ChildProcess
from engine.runtime.process.outcome import ProcessOutcome, last_words
from engine.runtime.protocol.messages import AnyMessage, Failure, Hello, Job, Load, Message, Probe, Request

DEFAULT_TIMEOUT_S = 30.0
START_S = 20.0
"""Until a child of a few modules says hello, on a cold disk and a busy machine."""
CANCEL_POLL_S = 0.1
"""How often a question looks whether it was cancelled, if nothing wakes it."""
SMALL_CHILD = {"MALLOC_ARENA_MAX": "1"}
"""Environment of a child with limited address space: an arena of the allocator reserves 64 MiB of it."""
_END_TIMEOUT_S = 5.0

_Answer = TypeVar("_Answer", bound=Message)
_ERRORS: Mapping[str, Callable[[str], EngineError]] = {
    "argument": ArgumentError,
    "layout": LayoutError,
    "rig": RigError,
    "unreachable": UnreachableError,
    "busy": BusyError,
    "crashed": WorkerCrashedError,
    "stalled": WorkerStalledError,
}


class Questions:
    """A child for some questions, one after another; it is gone when this is left.

    `timeout_s`: for each answer; `start_timeout_s`: until the hello, None for `timeout_s` as well. `messages` and
    `own_group` as in `ChildProcess`. `stall_timeout_s`: longest silence, None for `timeout_s`.
    """

    def __init__(
        self,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        start_timeout_s: float | None = None,
        stall_timeout_s: float | None = None,
        argv: Sequence[str] | None = None,
        cancel: CancelToken | None = None,
        name: str = "question",
        environment: Mapping[str, str] | None = None,
        messages: Any = AnyMessage,
        own_group: bool = True,
    ) -> None:
        self._arrived: queue.SimpleQueue[Message | ProcessOutcome | None] = queue.SimpleQueue()
        self._timeout_s = timeout_s
        self._start_timeout_s = timeout_s if start_timeout_s is None else start_timeout_s
        self._greeted = False
        self._cancel = cancel or CancelToken()
        self._child = ChildProcess(
            self._arrived.put,
            self._arrived.put,
            argv=argv,
            stall_timeout_s=max(timeout_s, self._start_timeout_s) if stall_timeout_s is None else stall_timeout_s,
            name=name,
            environment=environment,
            messages=messages,
            own_group=own_group,
        )
        self._ahead = False

    def start_ahead(self) -> None:
        """Start the child now, for a question that comes later; until then it may be silent."""
        self._ahead = True
        self._child.start()
        self._child.watch(False)

    @property
    def pid(self) -> int | None:
        """The child's process id; None before its start."""
        return self._child.pid

    @property
    def outcome(self) -> ProcessOutcome | None:
        """How the child ended; None while it has not."""
        return self._child.outcome

    @property
    def has_ended(self) -> bool:
        return self._child.outcome is not None

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the child to end; return whether it has."""
        return self._child.wait(timeout_s) is not None

    def end(self, *, kill: bool = False) -> None:
        """End the child, waiting for it a bounded time; `kill`: without asking it first."""
        if kill:
            self._child.stop(ask_s=0.0, terminate_s=0.0)
        else:
            self._child.stop()
        self.wait_for_end(_END_TIMEOUT_S)

    def __enter__(self) -> Questions:
        if self._ahead:
            self._child.watch(True)
        else:
            self._child.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def ask(
        self,
        request: Request,
        answer_type: type[_Answer],
        *,
        cancel: CancelToken | None = None,
        cancelled: Callable[[], bool] | None = None,
        timeout_s: float | None = None,
        about: str = "",
    ) -> _Answer:
        """Send `request` and return the answer; `cancel` and `timeout_s` take the place of those for all questions.

        `cancelled` is a cancellation that has to be asked. `about`: what it is asked for, as the log of the child's end
        says it. The time counts anew when the child has come up: that takes as long as the machine is busy.

        Raises:
            EngineError: the child's `Failure` by its kind, its crash, a silence, or the cancel.
        """
        self._child.note_work(about)
        self._child.send(request)
        timeout_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        deadline_s = time.monotonic() + (timeout_s if self._greeted else self._start_timeout_s)
        cancel = cancel or self._cancel
        with cancel.waking(lambda: self._arrived.put(None)):
            while True:
                try:
                    message = self._next(request, cancel, deadline_s, cancelled)
                except queue.Empty:
                    raise WorkerStalledError(
                        tr(
                            "The engine process gave no answer within {timeout_s:g} s. Close other programs and try "
                            "again.",
                            timeout_s=timeout_s,
                        )
                    ) from None
                if isinstance(message, answer_type):
                    return message
                if isinstance(message, Hello):
                    self._greeted = True
                    deadline_s = time.monotonic() + timeout_s

    def stream(
        self, request: Request, answer_type: type[_Answer], last: type[Message], cancel: CancelToken
    ) -> Iterator[_Answer]:
        """Send `request` and yield its answers up to a message of type `last`. Only the stall timeout limits the time.

        Raises:
            EngineError: as `ask`.
        """
        self._child.send(request)
        with cancel.waking(lambda: self._arrived.put(None)):
            while not isinstance(message := self._next(request, cancel), last):
                if isinstance(message, answer_type):
                    yield message

    def _next(
        self,
        request: Request,
        cancel: CancelToken,
        deadline_s: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Message:
        """Return the next message; raises `queue.Empty` at the deadline, and else as `ask` does."""
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if cancelled is not None:
                left_s = CANCEL_POLL_S if left_s is None else min(CANCEL_POLL_S, left_s)
            try:
                message = self._arrived.get(timeout=left_s)
            except queue.Empty:
                if cancelled is not None and cancelled():
                    raise _cancelled() from None
                if cancelled is None or (deadline_s is not None and time.monotonic() >= deadline_s):
                    raise
                continue
            if isinstance(message, Failure):
                raise error_of(message, request)
            if isinstance(message, ProcessOutcome):
                raise message.error()
            raise_if_cancelled(cancel)
            if message is not None:
                return message


def ask_child(
    request: Request,
    answer_type: type[_Answer],
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    argv: Sequence[str] | None = None,
    cancel: CancelToken | None = None,
    name: str = "question",
) -> _Answer:
    """Start a child, send `request`, return the answer; the child is gone when this returns or raises.

    Raises:
        EngineError: as `Questions.ask`.
    """
    with Questions(timeout_s=timeout_s, argv=argv, cancel=cancel, name=name) as child:
        return child.ask(request, answer_type)


class SpareChild:
    """At most one child in waiting: started and asked nothing yet, so that the next probe need not wait for a start.

    It has not touched a device: it holds the engine's code and no device memory.

    For any thread. `prepare` starts a process and waits for the system to do that, nothing else waits but `close`.
    """

    def __init__(self, *, timeout_s: float, argv: Sequence[str] | None = None, name: str = "probe") -> None:
        self._timeout_s = timeout_s
        self._argv = argv
        self._name = name
        self._lock = threading.Lock()
        self._child: Questions | None = None
        self._closed = False

    def prepare(self) -> None:
        """Have a child in waiting. One that waits: nothing. One that has ended: a new one. Closed: nothing."""
        with self._lock:
            if self._closed or (self._child is not None and not self._child.has_ended):
                return
            self._child = Questions(timeout_s=self._timeout_s, argv=self._argv, name=self._name)
            self._child.start_ahead()

    def take(self, environment: Mapping[str, str] | None = None) -> Questions:
        """Return the child in waiting, else one that is yet to be started; to be used in a `with` statement.

        With an `environment` it is one that is yet to be started: the engine reads it before anything is asked.
        """
        if environment:
            return Questions(timeout_s=self._timeout_s, argv=self._argv, name=self._name, environment=environment)
        with self._lock:
            child, self._child = self._child, None
        if child is None or child.has_ended:
            return Questions(timeout_s=self._timeout_s, argv=self._argv, name=self._name)
        return child

    def close(self) -> None:
        """End the child in waiting, waiting for it a bounded time; nothing is prepared any more."""
        with self._lock:
            self._closed = True
            child, self._child = self._child, None
        if child is not None:
            child.end()


class KeptChild:
    """At most one child that answers one question after another: started by the first, and again after it ended.

    It stays in our process group. `end` ends it, and so does the end of our process. For one thread.
    """

    def __init__(self, name: str, messages: Any) -> None:
        self._name = name
        self._messages = messages
        self._child: Questions | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Its process id; None if none runs."""
        return None if self._child is None else self._child.pid

    def ask(self, request: Job, answer_type: type[_Answer]) -> _Answer:
        """Return the answer to `request`. A child that fails to give it is killed.

        Raises:
            WorkerStalledError: it took more than the time of `request`.
            EngineError: it broke down, or could not be started.
        """
        child = self._child
        if child is not None:
            try:
                return self._asked(child, request, answer_type)
            except WorkerStalledError:
                raise
            except EngineError:
                # It may have been killed since the last question. A question that breaks the child itself is asked
                # once more for nothing; how a child ended is not always known (somebody else may have collected it).
                pass
        if self._is_closed:
            raise _cancelled()
        child = self._child = Questions(
            argv=child_argv(self._name),
            name=self._name,
            timeout_s=request.seconds,
            start_timeout_s=START_S,
            environment=SMALL_CHILD,
            messages=self._messages | Hello | Failure,
            own_group=False,
        )
        child.start_ahead()
        if self._is_closed:  # `close` sets it before it looks for a child, and has missed this one.
            child.end(kill=True)
            raise _cancelled()
        return self._asked(child, request, answer_type)

    def _asked(self, child: Questions, request: Job, answer_type: type[_Answer]) -> _Answer:
        try:
            return child.ask(request, answer_type)
        except EngineError:
            self.end()
            raise

    def end(self) -> None:
        """Kill the child, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.end(kill=True)

    def close(self) -> None:
        """Kill the child and start no other. From any thread."""
        self._is_closed = True
        self.end()


def blaming(error: EngineError, endpoints: Iterable[str], routes: Mapping[str, str] | None = None) -> EngineError:
    """Return `error` of a child that asked these endpoints; one of a child that fell silent or down names them.

    `routes`: where it dialled for endpoints that are behind a tunnel.

    They had greeted well before: what came then they did not answer, or answered with what no engine survives.
    """
    asked = tuple(endpoints)
    if isinstance(error, UnreachableError):
        for endpoint, dialled in (routes or {}).items():
            if dialled and dialled in str(error):
                named_so = str(error).replace(dialled, endpoint)
                error = UnreachableError(named_so, device=error.device, endpoint=endpoint)
    named = isinstance(error, UnreachableError) and error.endpoint is not None
    if not asked or named or not isinstance(error, UnreachableError | WorkerStalledError | WorkerCrashedError):
        return error
    what = tr("fell silent") if isinstance(error, WorkerStalledError) else tr("went down")
    return UnreachableError(
        tr(
            "The engine process {what} while it asked {names}, which does not answer as an RPC "
            "worker should. Check what runs there, and start the worker again.",
            what=what,
            names=" or ".join(asked),
        ),
        endpoint=asked[0] if len(asked) == 1 else None,
    )


def raise_if_cancelled(cancel: CancelToken | None) -> None:
    """Raise the EngineError of a cancelled question."""
    if cancel is not None and cancel.cancelled:
        raise _cancelled()


def _cancelled() -> EngineError:
    return EngineError(tr("The question to the engine was cancelled."))


def error_of(failure: Failure, request: Request) -> EngineError:
    """Return the error of the failure's kind."""
    message = last_words(failure)
    if failure.kind == "model_file" and isinstance(request, Load | Probe):
        path = Path(request.path)
        return ModelFileError(path, message.removeprefix(f"{path.name}: "))
    return _ERRORS.get(failure.kind, EngineError)(message)
