"""A label that may be narrower than its text: the text is elided, and the tooltip shows all of it."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QLabel, QSizePolicy, QWidget

from widgets.common.roles import plain_tool_tip


class ElidedLabel(QLabel):
    """Plain text on one line, elided at its end."""

    def __init__(self, text: str = "", role: str = "", parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setTextFormat(Qt.TextFormat.PlainText)
        # With a `minimumSizeHint` of one ellipsis, `Preferred` lets the layout make the label narrower than its text.
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)
        if role:
            self.setProperty("role", role)
        self.setText(text)

    def shown_text(self) -> str:
        """Return the text as it is shown, elided to the present width."""
        return self.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideRight, self.contentsRect().width())

    def setText(self, text: str) -> None:
        """Show `text` on one line; line breaks become spaces."""
        # One line is painted and measured; a line break in an error message would add height.
        line = " ".join(text.split())
        # Labels with readings are set each second, mostly to the text that they have.
        if line != self.text():
            super().setText(line)
            self._update_tool_tip()

    def minimumSizeHint(self) -> QSize:
        """Return a size with room for an ellipsis only."""
        return QSize(self.fontMetrics().horizontalAdvance("…"), super().minimumSizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._update_tool_tip()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        # A painter begins with the direction of the application, not with that of the widget.
        painter.setLayoutDirection(self.layoutDirection())
        painter.setPen(self.palette().color(self.foregroundRole()))
        painter.drawText(self.contentsRect(), self.alignment().value, self.shown_text())
        painter.end()

    def _update_tool_tip(self) -> None:
        # A tooltip that repeats what is read already would only cover the row below.
        cut = self.shown_text() != self.text()
        self.setToolTip(plain_tool_tip(self.text()) if cut else "")
