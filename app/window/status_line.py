"""The line at the window's foot: what is being waited for, else the last thing that was said."""

from __future__ import annotations

from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QWidget

from app.notices import Notice
from engine.base.language import tr
from widgets.common.elided_label import ElidedLabel
from widgets.common.roles import set_role

GOOD_NEWS_MS = 10_000
"""How long a sentence stays that nobody has to act on."""


class StatusLine(ElidedLabel):
    """Bad news stays until the next notice, good news for a while; work in progress covers both and uncovers them."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent=parent)
        self._notice = Notice("", bad=False)
        self._busy: dict[str, str] = {}
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(GOOD_NEWS_MS)
        self._timer.timeout.connect(self._on_old)
        self.setAccessibleName(tr("Status"))
        self._refresh()

    def show_notice(self, notice: Notice) -> None:
        """Show `notice`."""
        self._notice = notice
        self._timer.stop()
        if notice.text and not notice.bad:
            self._timer.start()
        self._refresh()

    def set_busy(self, source: str, text: str) -> None:
        """Show what `source` is busy with; empty: with nothing any more."""
        # Taken out first: what is put in again comes last, and the last is shown.
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
