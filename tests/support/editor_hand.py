"""Mouse and keyboard events for a layout editor in a test."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QEvent, QPoint, QPointF, Qt
from PySide6.QtGui import QMouseEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication

from engine.planning.layout.moves import Move
from engine.planning.plan.preview import Preview
from widgets.layout_editor.editor import LayoutEditor
from widgets.layout_editor.preview_geometry import PreviewGeometry

LEFT = Qt.MouseButton.LeftButton
NONE = Qt.KeyboardModifier.NoModifier


class Hand:
    """Sends mouse and keyboard events to one editor. `said`: moves and ends of moves that the editor has reported."""

    def __init__(self, editor: LayoutEditor) -> None:
        self.editor = editor
        self.viewport = editor.view.viewport()
        self.said: list[object] = []
        editor.moved.connect(self.said.append)
        editor.move_finished.connect(lambda: self.said.append("finished"))
        editor.move_cancelled.connect(lambda: self.said.append("cancelled"))

    @property
    def moves(self) -> list[Move]:
        return [each for each in self.said if isinstance(each, Move)]

    @property
    def preview_geometry(self) -> PreviewGeometry:
        assert self.editor.preview_geometry is not None
        return self.editor.preview_geometry

    def press(self, point: QPoint, modifiers: Qt.KeyboardModifier = NONE) -> None:
        QTest.mousePress(self.viewport, LEFT, modifiers, point)

    def move(self, point: QPoint, buttons: Qt.MouseButton = LEFT) -> None:
        position = QPointF(point)
        event = QMouseEvent(
            QEvent.Type.MouseMove, position, self.viewport.mapToGlobal(position), Qt.MouseButton.NoButton, buttons, NONE
        )
        QApplication.sendEvent(self.viewport, event)

    def release(self, point: QPoint) -> None:
        QTest.mouseRelease(self.viewport, LEFT, NONE, point)

    def drag(self, start: QPoint, *points: QPoint) -> None:
        self.press(start)
        for point in points:
            self.move(point)
        self.release(points[-1])

    def click(self, point: QPoint, modifiers: Qt.KeyboardModifier = NONE) -> None:
        self.press(point, modifiers)
        self.release(point)

    def type(self, *keys: Qt.Key, held: Qt.KeyboardModifier = NONE) -> None:
        for key in keys:
            QTest.keyClick(self.editor.view, key, held)

    def at(self, x: float, y: float) -> QPoint:
        return self.editor.view.mapFromScene(QPointF(x, y))

    def layer(self, layer: int, lane: int | None = None) -> QPoint:
        """Return the centre of a layer's block in the viewport. `lane`: another lane than the layer's own."""
        left, right = self.preview_geometry.track.span(layer, layer)
        lane = self.preview_geometry.lane_of_layer(layer) if lane is None else lane
        # Off the middle: the dots of the handles are there.
        return self.at((left + right) / 2, self.preview_geometry.lanes.track_top(lane) + 12)

    def handle(self, index: int) -> QPoint:
        place = self.preview_geometry.handles[index]
        return self.at(place.x, place.dot_y)

    def edge(self, layer: int) -> int:
        """Return the x coordinate of a layer's left edge in the viewport."""
        return self.at(self.preview_geometry.track.edges[layer], 0).x()


MakeHand = Callable[[Preview], Hand]
