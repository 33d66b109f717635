"""Classes for callers that wait until a child process answers their request.

`BlockingChild` starts a child and sends it requests one after another. `SpareChild` starts one ahead of time, because
the start of the child takes most of the time of a probe. `PersistentChild` keeps one running between requests.
`request_child` is the short form for a single request.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
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
from engine.runtime.process.outcome import ProcessOutcome, failure_text
from engine.runtime.protocol.messages import AnyMessage, Failure, Hello, Message
from engine.runtime.protocol.requests import CountVocabulary, Job, Load, Probe, Request

DEFAULT_TIMEOUT_S = 30.0
START_S = 20.0
"""Seconds in which a small child must send its first message (`Hello`); enough for a cold disk and a busy machine."""
CANCEL_POLL_S = 0.1
"""Interval in seconds at which `ask` calls its argument `cancelled`. A `CancelToken` wakes `ask` at once."""
SMALL_CHILD = {"MALLOC_ARENA_MAX": "1"}
"""Environment of a child with limited address space: one malloc arena, because glibc reserves 64 MiB for each further
one.
"""
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


class BlockingChild:
    """A child process that answers requests one after another.

    It is a context manager: `with` starts the child, and the child has ended when the block is left.

    `timeout_s`: time limit of each answer, in seconds.
    `start_timeout_s`: time limit of the child's first message (`Hello`), in seconds; None for `timeout_s`.
    `stall_limit_s`: longest silence; None for the longer of these two limits.
    `argv`: command that starts the child; None starts the child that runs llama.cpp.
    `cancel`: token that cancels the running request; None if requests are not cancelled by a token.
    `name`: role of the process, for process lists and the log.
    `environment`: variables to add to our own.
    `messages`: union of the message types that the child may send.
    `own_group`: whether the child leads a process group of its own.
    """

    def __init__(
        self,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        start_timeout_s: float | None = None,
        stall_limit_s: float | None = None,
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
            stall_limit_s=max(timeout_s, self._start_timeout_s) if stall_limit_s is None else stall_limit_s,
            name=name,
            environment=environment,
            messages=messages,
            own_group=own_group,
        )
        self._ahead = False
        self._is_cancelled = False

    def start_ahead(self) -> None:
        """Start the child now for a later request. The stall limit is off until the `with` block is entered."""
        self._ahead = True
        self._child.start()
        self._child.watch(False)

    @property
    def pid(self) -> int | None:
        """Process id of the child; None before its start."""
        return self._child.pid

    @property
    def has_begun(self) -> bool:
        """Whether the child's first message (`Hello`) has arrived."""
        return self._greeted

    @property
    def outcome(self) -> ProcessOutcome | None:
        """How the child ended; None until it has ended."""
        return self._child.outcome

    @property
    def has_ended(self) -> bool:
        return self._child.outcome is not None

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the child to end; return whether it has."""
        return self._child.wait(timeout_s) is not None

    def end(self, *, kill: bool = False) -> None:
        """End the child, and wait at most `_END_TIMEOUT_S` seconds for its end.

        `kill`: whether to kill it without a `Quit` first.
        """
        if kill:
            self._child.stop(quit_s=0.0, terminate_s=0.0)
        else:
            self._child.stop()
        self.wait_for_end(_END_TIMEOUT_S)

    def __enter__(self) -> BlockingChild:
        if self._ahead:
            self._child.watch(True)
        else:
            self._child.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Nobody waits for its answer any more. Asked to end, it would first finish its computation, or be killed after
        # 1.5 s all the same; whoever cancelled waits for this, because the child may hold device memory.
        self.end(kill=self._is_cancelled)

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
        """Send `request` and return its answer.

        `cancel`: token for this request; None for the token that was given to this object.
        `cancelled`: called every `CANCEL_POLL_S` seconds; True cancels the request.
        `timeout_s`: time limit of the answer, at most the limit of this object; None for the limit of this object.
        `about`: description of the request, for the log.

        Raises:
            EngineError: the child reported a `Failure`, crashed or took too long, or the request was cancelled.
        """
        self._child.note_work(about)
        self._child.send(request)
        timeout_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        deadline_s = time.monotonic() + (timeout_s if self._greeted else self._start_timeout_s)
        cancel = cancel or self._cancel
        # None in the queue only wakes the wait below; it is no message.
        with cancel.waking(lambda: self._arrived.put(None)):
            while True:
                try:
                    message = self._next(request, cancel, deadline_s, cancelled)
                except queue.Empty:
                    raise WorkerStalledError(
                        tr(
                            "The engine process gave no answer within {timeout_s:g} s. This computer may be too busy: "
                            "close other programs, then try again.",
                            timeout_s=timeout_s,
                        )
                    ) from None
                if isinstance(message, answer_type):
                    return message
                if isinstance(message, Hello):
                    # The time limit counts from here: how long the start takes depends on the load of the machine.
                    deadline_s = time.monotonic() + timeout_s

    def stream(
        self, request: Request, answer_type: type[_Answer], last: type[Message], cancel: CancelToken
    ) -> Iterator[_Answer]:
        """Send `request` and yield its answers, until a message of type `last` arrives.

        The stream as a whole has no time limit. Only the silence between two messages is limited (stall limit).

        Raises:
            EngineError: the child reported a `Failure` or crashed, or the request was cancelled.
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
        """Return the child's next message.

        `cancel`: the request's token; it wakes this call.
        `deadline_s`: time of `time.monotonic`; None: no deadline.
        `cancelled`: called several times a second; True cancels the request.

        Raises:
            queue.Empty: the deadline has passed.
            EngineError: the child reported a `Failure` or crashed, or the request was cancelled.
        """
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if cancelled is not None:
                left_s = CANCEL_POLL_S if left_s is None else min(CANCEL_POLL_S, left_s)
            try:
                message = self._arrived.get(timeout=left_s)
            except queue.Empty:
                if cancelled is not None and cancelled():
                    self._is_cancelled = True
                    raise _cancelled() from None
                if cancelled is None or (deadline_s is not None and time.monotonic() >= deadline_s):
                    raise
                continue
            if isinstance(message, Failure):
                raise error_of(message, request)
            if isinstance(message, ProcessOutcome):
                raise message.error()
            self._is_cancelled = self._is_cancelled or cancel.cancelled
            raise_if_cancelled(cancel)
            if message is not None:
                self._greeted = self._greeted or isinstance(message, Hello)
                return message


def request_child(
    request: Request,
    answer_type: type[_Answer],
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    argv: Sequence[str] | None = None,
    cancel: CancelToken | None = None,
    name: str = "question",
    environment: Mapping[str, str] | None = None,
) -> _Answer:
    """Start a child, send `request` and return its answer. The child has ended when this returns or raises.

    `timeout_s`: time limit of the answer, in seconds.
    `argv`: command that starts the child; None starts the child that runs llama.cpp.
    `name`: role of the process, for process lists and the log.
    `environment`: variables to add to our own.

    Raises:
        EngineError: the child reported a `Failure`, crashed or took too long, or the request was cancelled.
    """
    with BlockingChild(timeout_s=timeout_s, argv=argv, cancel=cancel, name=name, environment=environment) as child:
        return child.ask(request, answer_type)


class SpareChild:
    """Keeps one child started ahead of time, so that the next probe need not wait for the start of its process.

    The spare child has loaded llama.cpp's code but touched no device, so that it holds no device memory. Thread-safe.
    `prepare` blocks until a process has started. `close`, and sometimes `take`, block until a process has ended.
    """

    def __init__(self, *, timeout_s: float, argv: Sequence[str] | None = None, name: str = "probe") -> None:
        self._timeout_s = timeout_s
        self._argv = argv
        self._name = name
        self._lock = threading.Lock()
        self._environment: Mapping[str, str] = {}
        self._child: BlockingChild | None = None
        self._closed = False

    def prepare(self) -> None:
        """Start the spare child with the environment of the last `take`. Does nothing if it runs, or after `close`."""
        with self._lock:
            if self._closed or (self._child is not None and not self._child.has_ended):
                return
            self._child = self._new(self._environment)
            self._child.start_ahead()

    def take(self, environment: Mapping[str, str] | None = None) -> BlockingChild:
        """Return the spare child if it was started with the variables of `environment`, else a new child.

        A new child starts when its `with` block is entered. A spare child with other variables is killed, because ggml
        and the drivers read environment variables only at the start of the process.
        """
        wanted = environment or {}
        with self._lock:
            child, self._child = self._child, None
            is_alike, self._environment = wanted == self._environment, wanted
        # A waiting child may have been killed, such as by the system when memory ran out.
        if child is not None and is_alike and not child.has_ended:
            return child
        if child is not None:
            child.end(kill=True)
        return self._new(wanted)

    def _new(self, environment: Mapping[str, str]) -> BlockingChild:
        return BlockingChild(timeout_s=self._timeout_s, argv=self._argv, name=self._name, environment=environment)

    def close(self) -> None:
        """End the spare child, and wait a bounded time for its end. Later calls of `prepare` do nothing."""
        with self._lock:
            self._closed = True
            child, self._child = self._child, None
        if child is not None:
            child.end()


class PersistentChild:
    """A child process that is kept between requests. A request starts a new child if none is running.

    The child stays in our process group and is killed with it. `close` may be called in any thread, all other methods
    in one thread.
    """

    def __init__(self, name: str, messages: Any) -> None:
        self._name = name
        self._messages = messages
        self._child: BlockingChild | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the child; None if there is no child."""
        return None if self._child is None else self._child.pid

    def ask(self, request: Job, answer_type: type[_Answer]) -> _Answer:
        """Send `request` and return its answer. A child that fails to answer is killed.

        If the child was already running before this request and fails, a new child gets the request once more. An
        answer that took too long is not requested again.

        Raises:
            WorkerStalledError: the answer took longer than `request.seconds`.
            EngineError: the child crashed or could not be started, or `close` was called.
        """
        child = self._child
        if child is not None:
            try:
                return self._asked(child, request, answer_type)
            except WorkerStalledError:
                raise
            except EngineError:
                # The child may have been killed since the last request, so that a new one gets the request. If the
                # request itself breaks the child, this costs a second try. The outcome cannot decide, because other
                # code may have collected the process (waitpid) before.
                pass
        if self._is_closed:
            raise _cancelled()
        child = self._child = BlockingChild(
            argv=child_argv(self._name),
            name=self._name,
            timeout_s=request.seconds,
            start_timeout_s=START_S,
            environment=SMALL_CHILD,
            messages=self._messages | Hello | Failure,
            own_group=False,
        )
        child.start_ahead()
        if self._is_closed:  # `close` ran in another thread after the check above, and did not see this child.
            child.end(kill=True)
            raise _cancelled()
        return self._asked(child, request, answer_type)

    def _asked(self, child: BlockingChild, request: Job, answer_type: type[_Answer]) -> _Answer:
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
        """Kill the child; later requests fail. May be called in any thread."""
        self._is_closed = True
        self.end()


def error_with_endpoints(
    error: EngineError, endpoints: Iterable[str], routes: Mapping[str, str] | None = None
) -> EngineError:
    """Return an error that names the RPC endpoints in use if one of them may be the cause; else return `error`.

    All endpoints answered a check before the request. If the child crashes or stalls after that, one of them has
    probably given llama.cpp a wrong answer or none.

    `routes`: tunnels to paired machines: the local address of each tunnel, by the endpoint that it leads to.
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
    names = " or ".join(asked)
    return UnreachableError(
        tr(
            "The engine process got no valid answer from {names}. Check which program runs there, and restart the "
            "RPC worker.",
            names=names,
        )
        if isinstance(error, WorkerStalledError)
        else tr(
            "The engine process crashed while it used {names}, which does not answer like an RPC worker. Check which "
            "program runs there, and restart the worker.",
            names=names,
        ),
        endpoint=asked[0] if len(asked) == 1 else None,
    )


def raise_if_cancelled(cancel: CancelToken | None) -> None:
    """Raise the `EngineError` for a cancelled request if `cancel` is set."""
    if cancel is not None and cancel.cancelled:
        raise _cancelled()


def _cancelled() -> EngineError:
    return EngineError(tr("The request to the engine was cancelled."))


def error_of(failure: Failure, request: Request) -> EngineError:
    """Return the exception for a `Failure` that a child reported; `failure.kind` selects the exception's class.

    `request`: the request that failed. A `ModelFileError` gets the path of the model file from it.
    """
    message = failure_text(failure)
    if failure.kind == "model_file" and isinstance(request, Load | Probe | CountVocabulary):
        path = Path(request.path)
        return ModelFileError(path, message.removeprefix(f"{path.name}: "))
    return _ERRORS.get(failure.kind, EngineError)(message)
