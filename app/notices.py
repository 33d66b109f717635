"""Notices: messages for the window's status line, which any object of the window can send."""

from __future__ import annotations

from msgspec import Struct
from PySide6.QtCore import QObject, Signal

from engine.base.errors import EngineError
from engine.base.texts import show


class Notice(Struct, frozen=True):
    """A message for the status line.

    `bad`: whether the message reports a failure. A failure stays on the status line until the next message.
    """

    text: str
    bad: bool = True


class Notices(QObject):
    """Signals that carry notices from any object of the window to the status line."""

    given = Signal(Notice)
    withdrawn = Signal(str)
    """Carries the text of a notice that is not true any more and must be removed."""

    def show(self, text: str, *, bad: bool = False) -> None:
        """Show `text` on the status line. `bad`: whether it reports a failure."""
        self.given.emit(Notice(show(text), bad))

    def withdraw(self, text: str) -> None:
        """Remove the notice with this text from the status line."""
        self.withdrawn.emit(show(text))

    def show_error(self, error: EngineError) -> None:
        """Show the summary of an expected error on the status line, as a failure."""
        self.given.emit(Notice(error.summary()))
