"""The list of models: a click or Enter chooses."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QFocusEvent, QKeyEvent, QMouseEvent
from PySide6.QtWidgets import QListView, QWidget

from widgets.common.painting import keep_left_to_right


class RecentListView(QListView):
    """Reports Enter as a click, and a double click as one: opening a model twice takes twice as long."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._is_double_click = False
        keep_left_to_right(self)

    def focusInEvent(self, event: QFocusEvent) -> None:
        """Show where the keyboard is: the delegate frames the current row."""
        super().focusInEvent(event)
        by_key = event.reason() in (Qt.FocusReason.TabFocusReason, Qt.FocusReason.BacktabFocusReason)
        if by_key and not self.currentIndex().isValid():
            self.setCurrentIndex(self.model().index(0, 0))

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        self._is_double_click = True

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        if self._is_double_click:
            self._is_double_click = False
            return
        super().mouseReleaseEvent(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and self.currentIndex().isValid():
            self.clicked.emit(self.currentIndex())
            return
        super().keyPressEvent(event)
