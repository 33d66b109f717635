"""Three dots that take turns: an answer is asked for, and its first word has not come yet."""

from __future__ import annotations

from PySide6.QtCore import QPointF, Qt, QTimer
from PySide6.QtGui import QColor, QHideEvent, QPainter, QPaintEvent, QShowEvent
from PySide6.QtWidgets import QWidget

from engine.language import tr
from widgets.markdown.typesetter import Typesetter

HEIGHT_PX = 22
RADIUS_PX = 3.0
STEP_PX = 12
TURN_MS = 320
COUNT = 3


class WaitingDots(QWidget):
    """They move only while they are seen."""

    def __init__(self, typesetter: Typesetter, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._typesetter = typesetter
        self._turn = 0
        self._timer = QTimer(self)
        self._timer.setInterval(TURN_MS)
        self._timer.timeout.connect(self._step)
        self.setAccessibleName(tr("The answer has not begun yet"))
        self.resize(COUNT * STEP_PX, HEIGHT_PX)
        self.hide()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._timer.start()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._timer.stop()

    def paintEvent(self, _event: QPaintEvent) -> None:
        palette = self._typesetter.palette
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        for place in range(COUNT):
            painter.setBrush(QColor(palette.dim if place == self._turn else palette.line))
            painter.drawEllipse(QPointF(place * STEP_PX + RADIUS_PX + 1, self.height() / 2), RADIUS_PX, RADIUS_PX)
        painter.end()

    def _step(self) -> None:
        self._turn = (self._turn + 1) % COUNT
        self.update()
