"""Asking a short-lived child one question."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from engine.cancellation import CancelToken
from engine.errors import (
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
from engine.language import tr
from engine.process.child import ChildProcess
from engine.process.outcome import ProcessOutcome, last_words
from engine.protocol.messages import AnyMessage, AnyRequest, Failure, Hello, Load, Message, Probe

DEFAULT_TIMEOUT_S = 30.0
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
    """A child for some questions, one after another; it is gone when this is left."""

    def __init__(
        self,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        argv: Sequence[str] | None = None,
        cancel: CancelToken | None = None,
        name: str = "question",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._arrived: queue.SimpleQueue[AnyMessage | ProcessOutcome | None] = queue.SimpleQueue()
        self._timeout_s = timeout_s
        self._cancel = cancel or CancelToken()
        self._child = ChildProcess(
            self._arrived.put,
            self._arrived.put,
            argv=argv,
            stall_timeout_s=timeout_s,
            name=name,
            environment=environment,
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
    def has_ended(self) -> bool:
        return self._child.outcome is not None

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the child to end; return whether it has."""
        return self._child.wait(timeout_s) is not None

    def end(self) -> None:
        """End the child, waiting for it a bounded time."""
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
        request: AnyRequest,
        answer_type: type[_Answer],
        *,
        cancel: CancelToken | None = None,
        timeout_s: float | None = None,
        about: str = "",
    ) -> _Answer:
        """Send `request` and return the answer; `cancel` and `timeout_s` take the place of those for all questions.

        `about`: what it is asked for, as the log of the child's end says it.

        The time counts anew when the child has come up: that takes as long as the machine is busy.

        Raises:
            EngineError: the child's `Failure` by its kind, its crash, a silence, or the cancel.
        """
        self._child.note_work(about)
        self._child.send(request)
        timeout_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        deadline_s = time.monotonic() + timeout_s
        cancel = cancel or self._cancel
        with cancel.waking(lambda: self._arrived.put(None)):
            while True:
                try:
                    message = self._arrived.get(timeout=max(0.0, deadline_s - time.monotonic()))
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
                    deadline_s = time.monotonic() + timeout_s
                if isinstance(message, Failure):
                    raise error_of(message, request)
                if isinstance(message, ProcessOutcome):
                    raise message.error()
                raise_if_cancelled(cancel)


def ask_child(
    request: AnyRequest,
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
        raise EngineError(tr("The question to the engine was cancelled."))


def error_of(failure: Failure, request: AnyRequest) -> EngineError:
    """Return the error of the failure's kind."""
    message = last_words(failure)
    if failure.kind == "model_file" and isinstance(request, Load | Probe):
        path = Path(request.path)
        return ModelFileError(path, message.removeprefix(f"{path.name}: "))
    return _ERRORS.get(failure.kind, EngineError)(message)
