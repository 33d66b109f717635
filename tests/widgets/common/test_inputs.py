"""Fields and the mouse wheel: a field changes only while it has the keyboard focus."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QWheelEvent
from PySide6.QtWidgets import QAbstractSlider, QApplication, QComboBox, QLineEdit, QVBoxLayout, QWidget
from pytestqt.qtbot import QtBot

from widgets.common.inputs import ComboBox, DoubleSpinBox, Slider, SpinBox

ROOT = Path(__file__).resolve().parents[3]
RAW = re.compile(r"\bQ(?:ComboBox|SpinBox|DoubleSpinBox|Slider)\((?!\))")


def combo_box() -> ComboBox:
    box = ComboBox()
    box.addItems(["0", "1", "2"])
    box.setCurrentIndex(1)
    return box


def slider() -> Slider:
    made = Slider()
    made.setValue(1)
    return made


def spin_box() -> SpinBox:
    box = SpinBox()
    box.setValue(1)
    return box


def double_spin_box() -> DoubleSpinBox:
    box = DoubleSpinBox()
    box.setValue(1)
    return box


def value_of(field: QWidget) -> float:
    if isinstance(field, QComboBox):
        return field.currentIndex()
    return field.value() if isinstance(field, QAbstractSlider) else field.property("value")


def turn_wheel(field: QWidget) -> bool:
    """Send one notch away from the user, and return whether the field took it."""
    middle = QPointF(field.rect().center())
    event = QWheelEvent(
        middle,
        field.mapToGlobal(middle),
        QPoint(),
        QPoint(0, 120),
        Qt.MouseButton.NoButton,
        Qt.KeyboardModifier.NoModifier,
        Qt.ScrollPhase.NoScrollPhase,
        False,
    )
    QApplication.sendEvent(field, event)
    return event.isAccepted()


@pytest.mark.parametrize("make", [combo_box, spin_box, double_spin_box, slider])
def test_only_a_field_with_the_focus_takes_the_wheel(qtbot: QtBot, make: Callable[[], QWidget]) -> None:
    window, field, other = QWidget(), make(), QLineEdit()
    qtbot.addWidget(window)
    column = QVBoxLayout(window)
    column.addWidget(other)
    column.addWidget(field)
    window.show()
    window.activateWindow()
    other.setFocus()
    qtbot.waitUntil(other.hasFocus)

    assert not turn_wheel(field)
    assert not turn_wheel(field)  # Qt's combo box takes the focus with the first notch.
    assert (value_of(field), field.hasFocus()) == (1, False)

    field.setFocus()
    qtbot.waitUntil(field.hasFocus)
    turn_wheel(field)
    assert value_of(field) != 1


def test_all_fields_of_the_window_are_made_of_these() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("app", "widgets")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "inputs.py"
        for line in path.read_text("utf-8").splitlines()
        if RAW.search(line)
    ]
    assert not found
