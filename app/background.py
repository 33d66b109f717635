"""Background threads for work that may wait for files, sockets or child processes; results arrive in the GUI thread.

`Background.run` is for work whose result is always wanted. `Background.latest` is for work that a newer request
replaces: the older work is cancelled, and its result, error and progress are dropped.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from msgspec import Struct
from PySide6.QtCore import QObject, Qt, Signal

from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError

_T = TypeVar("_T")
_Progress = TypeVar("_Progress")
_OnError = Callable[[EngineError], None]
_log = logging.getLogger("layerdeck.background")


class _Answer(Struct, frozen=True):
    work: object
    deliver: Callable[[], None]


class Task(Struct, Generic[_Progress], frozen=True):
    """Cancellation token and progress callback of a function that `Latest.run` calls. May be used in any thread.

    `token`: cancelled when a newer request replaces this one, or when a method of `Latest` ends it.
    `report`: reports progress. The value is delivered in the GUI thread, unless the request was replaced meanwhile.
    """

    token: CancelToken
    report: Callable[[_Progress], None]


class Background(QObject):
    """Runs each function in a daemon thread of its own, and delivers its result in the GUI thread.

    The threads are daemons, so that a thread that waits for a dead disk does not keep the program from exiting.
    """

    busy_changed = Signal(str)  # description of the newest work that runs, for people; empty if none runs

    _answered = Signal(object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._closed = False
        self._shown: dict[object, str] = {}
        # Queued explicitly: threads emit this signal, and receivers run in the GUI thread.
        self._answered.connect(self._on_answered, Qt.ConnectionType.QueuedConnection)

    def run(
        self,
        what: str,
        function: Callable[[], _T],
        on_result: Callable[[_T], None],
        on_error: _OnError,
        *,
        quiet: bool = False,
        worker: Worker | None = None,
    ) -> None:
        """Run `function` in the background, then call `on_result` or `on_error` in the GUI thread.

        `on_error` gets an `EngineError`; any other exception is a bug and is raised in the GUI thread.
        `what`: description on the status line while the work runs, such as "Reading demo.gguf", unless `quiet`.
        `worker`: runs `function` in its thread, after all functions that were submitted to it before. None: `function`
        gets a new thread. Writes to one file need a worker: in two threads the later write could come first.
        """
        # A key of its own: two pieces of work may have the same description.
        work = object()
        if not quiet:
            self._shown[work] = what
            self._emit_busy()
        call = partial(self._work, work, function, on_result, on_error)
        if worker is not None:
            worker.submit(call)
        else:
            threading.Thread(target=call, name=what, daemon=True).start()

    def latest(self) -> Latest:
        """Return a runner for requests that replace each other: only the result of the newest one is delivered."""
        return Latest(self)

    def deliver(self, call: Callable[[], None]) -> None:
        """Call `call` in the GUI thread. May be called in any thread."""
        self._answer(None, call)

    def close(self) -> None:
        """Stop delivering results and errors. Does not wait for running threads."""
        self._closed = True

    def _work(
        self,
        work: object,
        function: Callable[[], Any],
        on_result: Callable[[Any], None],
        on_error: Callable[[EngineError], None],
    ) -> None:
        try:
            result = function()
        except EngineError as error:
            # Python deletes the name `error` at the end of the block, before the lambda is called.
            expected = error
            self._answer(work, lambda: on_error(expected))
        except Exception as error:
            bug = error
            _log.exception("bug in background work %s", threading.current_thread().name)

            def raise_bug() -> None:
                raise bug

            self._answer(work, raise_bug)
        else:
            self._answer(work, lambda: on_result(result))

    def _answer(self, work: object, deliver: Callable[[], None]) -> None:
        # Read without a lock: `_on_answered` drops a result that slips through.
        if not self._closed:
            self._answered.emit(_Answer(work, deliver))

    def _on_answered(self, answer: _Answer) -> None:
        if self._closed:
            return
        if self._shown.pop(answer.work, None) is not None:
            self._emit_busy()
        answer.deliver()

    def _emit_busy(self) -> None:
        self.busy_changed.emit(next(reversed(self._shown.values()), ""))


class Latest:
    """Runs requests that replace each other: a new request cancels the previous one and drops its results.

    `cancel` cancels the running request and drops its result, without a new request. `stop` and `close` only cancel the
    token of the request: its result is still delivered, because the work may return what it has found so far.

    All methods are called in the GUI thread, and all results are delivered there, so no lock is needed.
    """

    def __init__(self, background: Background) -> None:
        self._background = background
        self._token: CancelToken | None = None
        self._ended = threading.Event()

    @property
    def is_running(self) -> bool:
        """Whether the newest request still runs."""
        return self._token is not None

    def run(
        self,
        what: str,
        work: Callable[[Task[_Progress]], _T],
        on_result: Callable[[_T], None],
        on_error: _OnError,
        on_progress: Callable[[_Progress], None] | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        """Run `work` in a background thread, then call `on_result` or `on_error` in the GUI thread.

        If another request starts before `work` has ended, this request is cancelled, and neither function is called.
        `what`: description on the status line while the work runs, unless `quiet`.
        `on_progress`: called in the GUI thread with each value that `work` reports by `Task.report`.
        """
        self.cancel()
        token = self._token = CancelToken()
        ended = self._ended = threading.Event()

        def call() -> _T:
            try:
                return work(Task(token, report))
            finally:
                # The child processes of the work have ended by now, so `close` can go on.
                ended.set()

        def report(progress: _Progress) -> None:
            def deliver() -> None:
                if on_progress is not None and token is self._token:
                    on_progress(progress)

            self._background.deliver(deliver)

        def done(result: _T) -> None:
            # `cancel` or a newer request has set another token. The result is then not wanted any more.
            if token is self._token:
                self._token = None
                on_result(result)

        def failed(error: EngineError) -> None:
            if token is self._token:
                self._token = None
                on_error(error)

        self._background.run(what, call, done, failed, quiet=quiet)

    def cancel(self) -> None:
        """Cancel the request that runs, if there is one. Its result is dropped."""
        self.stop()
        self._token = None

    def stop(self) -> None:
        """Cancel the token of the running request, so that it ends early. Its result is still delivered."""
        if self._token is not None:
            self._token.cancel()

    def close(self, wait_s: float) -> None:
        """Stop the request that runs, and wait at most `wait_s` seconds for its end."""
        if self._token is not None:
            self._token.cancel()
            # Set in the background thread: the result itself cannot arrive while the GUI thread waits here.
            self._ended.wait(wait_s)


class Worker:
    """Runs functions one after another in a background thread, which exists only while functions wait or run."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._runs = False

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` in the background thread, after all functions that were submitted before."""
        with self._lock:
            self._waiting.append(work)
            # Under the lock, as the end of `_run` is: no work is left without a thread.
            if self._runs:
                return
            self._runs = True
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._runs = False
                    return
                work = self._waiting.popleft()
            try:
                work()
            except Exception:
                # The outermost edge of this thread: the work that waits is still done.
                _log.exception("bug in %s", self._name)
