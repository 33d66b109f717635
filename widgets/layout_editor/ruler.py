"""The ruler over the lanes: layer numbers, as many as there is room for."""

from __future__ import annotations

from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QWidget

from widgets.common.painting import colour
from widgets.common.palette import DARK, Palette
from widgets.common.text import Fonts, text_width
from widgets.layout_editor.geometry import Track

HEIGHT = 24
_MIN_DISTANCE = 44.0


def ruler_step(n_layers: int, width: float, min_distance: float = _MIN_DISTANCE) -> int:
    """Return the power of two between numbered layers that keeps numbers `min_distance` pixels apart on average."""
    step = 1
    while step < n_layers and width / max(n_layers, 1) * step < min_distance:
        step *= 2
    return step


class Ruler(QWidget):
    """Numbers over the left ends of the layers."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._fonts = Fonts()
        self._track: Track | None = None
        self._palette = DARK

    def set_track(self, track: Track | None, palette: Palette) -> None:
        """Number the layers of `track`."""
        if track != self._track or palette is not self._palette:
            self._track, self._palette = track, palette
            self.update()

    def sizeHint(self) -> QSize:
        """One line of small text."""
        return QSize(0, HEIGHT)

    def paintEvent(self, event: QPaintEvent) -> None:
        """Paint numbers and ticks; a number that would touch the one before is left out."""
        track = self._track
        if track is None or track.n_layers == 0:
            return
        painter = QPainter(self)
        painter.setFont(self._fonts.small)
        painter.setPen(colour(self._palette.dim))
        step = ruler_step(track.n_layers, track.edges[-1] - track.edges[0])
        free_from = -1.0
        for layer in range(0, track.n_layers, step):
            centre = round((track.edges[layer] + track.edges[layer + 1] - 1) / 2) + 0.5
            width = text_width(str(layer), self._fonts.small)
            if centre - width / 2 < free_from:
                continue
            free_from = centre + width / 2 + 8
            rect = QRectF(centre - width / 2 - 2, 0, width + 4, HEIGHT - 7)
            painter.drawText(rect, int(Qt.AlignmentFlag.AlignCenter), str(layer))
            painter.drawLine(QPointF(centre, HEIGHT - 5), QPointF(centre, HEIGHT - 2))
        painter.end()
