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
    deliver: Callable[[], None]


class Background(QObject):
    """Runs functions in daemon threads: one that hangs on a dead disk does not keep the program from ending."""

    _answered = Signal(object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._closed = False
        self._answered.connect(self._on_answered, Qt.ConnectionType.QueuedConnection)

    def run(
        self,
        what: str,
        function: Callable[[], _T],
        on_result: Callable[[_T], None],
        on_error: _OnError,
    ) -> None:
        """Run `function`, then `on_result` or `on_error` in the GUI thread. Other exceptions are bugs, raised there."""
        threading.Thread(target=self._work, args=(function, on_result, on_error), name=what, daemon=True).start()

    def close(self) -> None:
        """Deliver nothing any more."""
        self._closed = True

    def _work(
        self, function: Callable[[], Any], on_result: Callable[[Any], None], on_error: Callable[[EngineError], None]
    ) -> None:
        try:
            result = function()
        except EngineError as error:
            expected = error
            self._answer(lambda: on_error(expected))
        except Exception as error:
            bug = error
            _log.exception("bug in background work %s", threading.current_thread().name)

            def raise_bug() -> None:
                raise bug

            self._answer(raise_bug)
        else:
            self._answer(lambda: on_result(result))

    def _answer(self, deliver: Callable[[], None]) -> None:
        if not self._closed:
            self._answered.emit(_Answer(deliver))

    def _on_answered(self, answer: _Answer) -> None:
        if not self._closed:
            answer.deliver()
