"""Controls of one setting each, by the kind of its value, and the boxes for numbers that they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from PySide6.QtCore import QEvent, QObject, Qt, Signal
from PySide6.QtGui import QStandardItemModel, QValidator
from PySide6.QtWidgets import QComboBox, QSpinBox, QToolButton, QWidget

from engine.planning.plan.decisions.decision import Decision
from engine.planning.settings.context_settings import AUTO
from engine.planning.settings.kinds import Choice, Switch, Value, WholeNumber
from engine.planning.settings.table import CONTEXT_STEP as STEP
from engine.planning.settings.table import Setting
from widgets.common.counts import SEPARATOR, format_count, parse_count
from widgets.common.tool_tips import plain_tool_tip


def show_number(box: QSpinBox, number: int) -> int:
    """Show `number` without a signal, and return what the box makes of it.

    Where it has that number already, the text stays: somebody may be typing another one.
    """
    if box.value() != min(max(number, box.minimum()), box.maximum()):
        blocked = box.blockSignals(True)
        box.setValue(number)
        box.blockSignals(blocked)
    return box.value()


def is_typed_in(box: QSpinBox) -> bool:
    """Return whether somebody is typing a number that is not entered yet."""
    return box.hasFocus() and box.lineEdit().isModified()


MAX_TOKENS = 1 << 24
PADDING = 22


class TokenSpinBox(QSpinBox):
    """Reports a value when it is entered, not while it is typed; typed values are rounded up as the engine does."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setRange(STEP, MAX_TOKENS)
        self.setSingleStep(STEP)
        self.setKeyboardTracking(False)
        self.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.setAccelerated(True)
        self.lineEdit().setAcceptDrops(False)  # Dropped files are for the window.
        self.setFixedWidth(self.fontMetrics().horizontalAdvance(format_count(8 * 131072)) + PADDING)

        # With the value entered, Ctrl+Z is for the layout again and no longer for the typed text.
        self.lineEdit().returnPressed.connect(self.clearFocus)

    def textFromValue(self, value: int) -> str:
        return format_count(value)

    def valueFromText(self, text: str) -> int:
        typed = parse_count(text) or STEP
        return min(-(-typed // STEP) * STEP, MAX_TOKENS)

    def validate(self, text: str, position: int) -> tuple[QValidator.State, str, int]:
        if all(character in "0123456789 ,." or character == SEPARATOR for character in text):
            found = parse_count(text)
            state = QValidator.State.Intermediate if found is None else QValidator.State.Acceptable
            return state, text, position
        return QValidator.State.Invalid, text, position


MOST_SHOWN = 1 << 20
"""Numbers in plain boxes; a file may say more, which then stays as it is until somebody enters another."""


class SettingControl(QObject):
    """Shows the value of one setting and says when somebody enters another. `widgets` are to be laid out in a row."""

    edited = Signal()

    def __init__(self, *widgets: QWidget) -> None:
        super().__init__()
        self.widgets = widgets
        for widget in widgets:
            # Scrolling through a form is not to change what happens to be under the mouse.
            widget.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
            widget.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Wheel and isinstance(watched, QWidget) and not watched.hasFocus():
            event.ignore()
            return True
        return super().eventFilter(watched, event)

    def value(self) -> Value:
        """Return what is entered."""
        raise NotImplementedError

    def show_value(self, value: Value, decided: Decision | None) -> None:
        """Show `value`, and what is used where it is left open; says nothing."""
        raise NotImplementedError

    def disable_choices(self, refused: Mapping[str, str]) -> None:
        """Show which values cannot be had, with the reasons, where there are values to choose from."""


class ChoiceControl(SettingControl):
    """A box with the words of a choice or a switch."""

    def __init__(self, name: str, kind: Choice | Switch) -> None:
        self.box = QComboBox()
        self.box.addItems(list(kind.words))
        self.box.setAccessibleName(name)
        super().__init__(self.box)
        self._kind = kind
        self.box.activated.connect(self.edited)

    def value(self) -> Value:
        return self._kind.typed(self.box.currentText())

    def show_value(self, value: Value, decided: Decision | None) -> None:
        self.box.setCurrentText(self._kind.text_of(value))

    def disable_choices(self, refused: Mapping[str, str]) -> None:
        """Grey them out, with the reason as their tool tip; the one that is set stays."""
        model = cast(QStandardItemModel, self.box.model())
        for index in range(self.box.count()):
            reason = refused.get(self.box.itemText(index))
            item = model.item(index)
            item.setEnabled(reason is None or index == self.box.currentIndex())
            item.setData(plain_tool_tip(reason or ""), Qt.ItemDataRole.ToolTipRole)


class NumberControl(SettingControl):
    """A box for a whole number; one that may be left open has "auto" as its least value."""

    def __init__(self, name: str, kind: WholeNumber) -> None:
        self.box = _number_box(name, kind)
        super().__init__(self.box)
        self._left_open = kind.left_open
        self._asked: Value = None
        self._shown = self.box.value()
        self.box.valueChanged.connect(self.edited)

    def value(self) -> Value:
        # What was asked for stays where nobody entered anything: the range of the box may be narrower.
        if self.box.value() == self._shown:
            return self._asked
        return self._left_open.kept if self._left_open is not None and not self.box.value() else self.box.value()

    def show_value(self, value: Value, decided: Decision | None) -> None:
        number = 0 if self._left_open is not None and value == self._left_open.kept else value
        self._asked, self._shown = value, _show_value(self.box, number)


class LengthControl(SettingControl):
    """A box for a length in tokens beside a button that leaves it open; then the box shows what is used."""

    def __init__(self, name: str, kind: WholeNumber) -> None:
        self.auto_button = QToolButton()
        self.auto_button.setText(AUTO.capitalize())
        self.auto_button.setCheckable(True)
        self.auto_button.setProperty("role", "segment")
        self.box = TokenSpinBox()
        self.box.setAccessibleName(name)
        super().__init__(self.auto_button, self.box)
        assert kind.left_open is not None
        self._open_value = kind.left_open.kept
        self._asked: Value = None
        self._shown = self.box.value()
        self.auto_button.toggled.connect(self.edited)
        self.box.valueChanged.connect(self.edited)

    def value(self) -> Value:
        if self.auto_button.isChecked():
            return self._open_value
        # A length that is no longer left open begins with what is shown.
        is_asked = self.box.value() == self._shown and self._asked != self._open_value
        return self._asked if is_asked else self.box.value()

    def show_value(self, value: Value, decided: Decision | None) -> None:
        is_open = value == self._open_value
        used = decided.value if decided is not None else value
        self._asked, self._shown = value, _show_value(self.box, used if is_open else value)
        blocked = self.auto_button.blockSignals(True)
        self.auto_button.setChecked(is_open)
        self.auto_button.blockSignals(blocked)
        self.box.setEnabled(not is_open)


def make_control(setting: Setting) -> SettingControl:
    """Return the control for the kind of value that `setting` has."""
    kind, name = setting.kind, setting.label
    if not isinstance(kind, WholeNumber):
        return ChoiceControl(name, kind)
    return LengthControl(name, kind) if kind.step > 1 else NumberControl(name, kind)


def _number_box(name: str, kind: WholeNumber) -> QSpinBox:
    """Return a box for a number; where it may be left open, 0 stands for that."""
    box = QSpinBox()
    box.setRange(kind.low if kind.left_open is None else 0, min(kind.high, MOST_SHOWN))
    if kind.left_open is not None:
        box.setSpecialValueText(AUTO)
    box.setKeyboardTracking(False)
    box.setAlignment(Qt.AlignmentFlag.AlignCenter)
    box.setAccessibleName(name)
    return box


def _show_value(box: QSpinBox, value: Value) -> int:
    """Show `value`, 0 where it is no number, and return what the box makes of it."""
    return show_number(box, value if isinstance(value, int) else 0)
