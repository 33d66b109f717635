"""The status line of the window: running work, else the last notice."""

from __future__ import annotations

from PySide6.QtWidgets import QWidget

from app.notices import Notice
from engine.base.language import tr
from widgets.common.delayed_call import DelayedCall
from widgets.common.elided_label import ElidedLabel
from widgets.common.roles import set_role

GOOD_NEWS_MS = 10_000
"""Milliseconds after which a notice that reports no failure disappears."""


class StatusLine(ElidedLabel):
    """Shows running work, or the last notice if no work runs.

    A notice about a failure stays until the next notice; other notices stay for `GOOD_NEWS_MS`.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent=parent)
        self._notice = Notice("", bad=False)
        self._busy: dict[str, str] = {}
        self._timer = DelayedCall(self, self._on_old, GOOD_NEWS_MS)
        self.setAccessibleName(tr("Status"))
        self._refresh()

    def show_notice(self, notice: Notice) -> None:
        """Show `notice` until it expires or the next one comes."""
        self._notice = notice
        self._timer.stop()
        if notice.text and not notice.bad:
            self._timer.start()
        self._refresh()

    def withdraw(self, text: str) -> None:
        """Remove the notice with this text if it is shown now."""
        if self._notice.text == text:
            self._on_old()

    def set_busy(self, source: str, text: str) -> None:
        """Show `text` as running work.

        `source`: name of the part of the program that works; an empty `text` means that its work has ended.
        """
        # Removed first, so that the newest work comes last in the dictionary; the last one is shown.
        self._busy.pop(source, None)
        if text:
            self._busy[source] = text
        self._refresh()

    def _on_old(self) -> None:
        self.show_notice(Notice("", bad=False))

    def _refresh(self) -> None:
        busy = next(reversed(self._busy.values()), "")
        set_role(self, "error" if self._notice.bad and not busy else "dim")
        self.setText(f"{busy}…" if busy else self._notice.text)
        self.setAccessibleDescription(self.text())
