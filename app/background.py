"""Work that may wait (files, sockets, children), done beside the GUI thread with the answer delivered in it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from PySide6.QtCore import QObject, Qt, Signal

from engine.errors import EngineError

_T = TypeVar("_T")
_OnError = Callable[[EngineError], None]
_log = logging.getLogger("layerdeck.background")


@dataclass(frozen=True, slots=True)
class _Answer:
    work: object
    deliver: Callable[[], None]


class Background(QObject):
    """Runs functions in daemon threads: one that hangs on a dead disk does not keep the program from ending.

    `busy_changed` tells people what is being waited for, the newest first; empty when nothing is.
    """

    busy_changed = Signal(str)

    _answered = Signal(object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._closed = False
        self._shown: dict[object, str] = {}
        self._answered.connect(self._on_answered, Qt.ConnectionType.QueuedConnection)

    def run(
        self,
        what: str,
        function: Callable[[], _T],
        on_result: Callable[[_T], None],
        on_error: _OnError,
        *,
        quiet: bool = False,
    ) -> None:
        """Run `function`, then `on_result` or `on_error` in the GUI thread. Other exceptions are bugs, raised there.

        `what` is for people, as in "Reading demo.gguf", and not shown where `quiet`.
        """
        work = object()
        if not quiet:
            self._shown[work] = what
            self._tell_busy()
        threading.Thread(target=self._work, args=(work, function, on_result, on_error), name=what, daemon=True).start()

    def close(self) -> None:
        """Deliver nothing any more."""
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
        if not self._closed:
            self._answered.emit(_Answer(work, deliver))

    def _on_answered(self, answer: _Answer) -> None:
        if self._closed:
            return
        if self._shown.pop(answer.work, None) is not None:
            self._tell_busy()
        answer.deliver()

    def _tell_busy(self) -> None:
        self.busy_changed.emit(next(reversed(self._shown.values()), ""))
