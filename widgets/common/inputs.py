"""Combo boxes, spin boxes and sliders that the mouse wheel changes only while they have the keyboard focus.

All fields of the window use these classes. With Qt's own classes, scrolling through a form changes each value that
comes under the pointer: a combo box gets the focus from the wheel, and a spin box or slider needs no focus at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import Qt
from PySide6.QtGui import QWheelEvent
from PySide6.QtWidgets import QComboBox, QDoubleSpinBox, QSlider, QSpinBox, QWidget

if TYPE_CHECKING:
    _Base = QWidget
else:
    # Qt's bindings allow one class of Qt among the bases.
    _Base = object


class _NeedsFocus(_Base):
    """Makes a field ignore the wheel while it has no focus."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        # Qt's default is WheelFocus: the first notch of the wheel would give the focus, the second a value.
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def wheelEvent(self, event: QWheelEvent) -> None:
        """Change the value if the field has the focus; otherwise let the scroll area around it scroll."""
        if self.hasFocus():
            super().wheelEvent(event)
        else:
            event.ignore()


class ComboBox(_NeedsFocus, QComboBox):
    """A combo box that ignores the wheel while it has no focus."""


class SpinBox(_NeedsFocus, QSpinBox):
    """A spin box that ignores the wheel while it has no focus."""


class DoubleSpinBox(_NeedsFocus, QDoubleSpinBox):
    """A spin box for fractions that ignores the wheel while it has no focus. It shows no trailing zeros."""

    def textFromValue(self, value: float) -> str:
        text, point = super().textFromValue(value), self.locale().decimalPoint()
        return text.rstrip("0").removesuffix(point) if point in text else text


class Slider(_NeedsFocus, QSlider):
    """A horizontal slider that ignores the wheel while it has no focus."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setOrientation(Qt.Orientation.Horizontal)
