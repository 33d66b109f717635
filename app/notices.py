"""Messages for the status line, from any part of the window."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QObject, Signal

from engine.base.errors import EngineError
from engine.base.texts import show


@dataclass(frozen=True, slots=True)
class Notice:
    """A message for the status line. `bad`: it reports a failure, and stays until the next message."""

    text: str
    bad: bool = True


class Notices(QObject):
    """Passes messages from objects that have one to the status line."""

    given = Signal(Notice)
    withdrawn = Signal(str)
    """The text of a notice that is not true any more and has to be removed."""

    def say(self, text: str, *, bad: bool = False) -> None:
        """Show `text`; with `bad`, as a failure."""
        self.given.emit(Notice(show(text), bad))

    def withdraw(self, text: str) -> None:
        """Remove the notice with this text."""
        self.withdrawn.emit(show(text))

    def tell(self, error: EngineError) -> None:
        """Show an expected error."""
        self.given.emit(Notice(error.summary()))
