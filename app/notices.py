"""What people are told: sentences from all over the program, on their way to the status line."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QObject, Signal

from engine.base.errors import EngineError
from engine.base.texts import show


@dataclass(frozen=True, slots=True)
class Notice:
    """Something to tell the user: a sentence, and whether it is bad news."""

    text: str
    bad: bool = True


class Notices(QObject):
    """Whoever has something to tell is given this, and need not know who shows it."""

    given = Signal(Notice)

    def say(self, text: str, *, bad: bool = False) -> None:
        """Tell what was done, or with `bad` what could not be."""
        self.given.emit(Notice(show(text), bad))

    def tell(self, error: EngineError) -> None:
        """Tell an expected error."""
        self.given.emit(Notice(error.summary()))
