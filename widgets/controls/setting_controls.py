"""The controls for settings: one class for each kind of value, and the number boxes that these classes use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtGui import QStandardItemModel, QValidator
from PySide6.QtWidgets import QDoubleSpinBox, QSpinBox, QToolButton, QWidget

from engine.base.units import SEPARATOR, format_count, parse_count
from engine.planning.plan.decisions.decision import Decision
from engine.planning.settings.context_settings import AUTO
from engine.planning.settings.kinds import Choice, Real, Switch, Value, WholeNumber
from engine.planning.settings.table import CONTEXT_STEP as STEP
from engine.planning.settings.table import Setting
from widgets.common.inputs import ComboBox, DoubleSpinBox, SpinBox
from widgets.common.roles import plain_tool_tip
from widgets.common.text import zoomed


def show_number(box: QSpinBox, number: int) -> int:
    """Show `number` without emitting a signal, and return it limited to the range of the box.

    If the box has that number already, its text stays, because the user may be typing another one.
    """
    # `setValue` writes the text again even if the value is the same, and with it what is being typed.
    if box.value() != min(max(number, box.minimum()), box.maximum()):
        blocked = box.blockSignals(True)
        box.setValue(number)
        box.blockSignals(blocked)
    return box.value()


def show_real(box: QDoubleSpinBox, number: float) -> float:
    """Show `number` without emitting a signal. Return the number that the box then has: rounded, and within its range.

    If the box has that number already, its text stays, because the user may be typing another one.
    """
    wanted = round(min(max(number, box.minimum()), box.maximum()), box.decimals())
    if round(box.value(), box.decimals()) != wanted:
        blocked = box.blockSignals(True)
        box.setValue(wanted)
        box.blockSignals(blocked)
    return box.value()


def is_typed_in(box: QSpinBox) -> bool:
    """Return whether the user is typing a number, and has not yet entered it by Enter or by leaving the box."""
    return box.hasFocus() and box.lineEdit().isModified()


# 16,777,216 tokens: more than any model is trained for. `QSpinBox` needs some upper limit.
MAX_TOKENS = 1 << 24
_COUNT_CHARACTERS = f"0123456789 ,.'_kKmM\u00a0{SEPARATOR}"
PADDING = 22


class TokenSpinBox(SpinBox):
    """Number box for a number of tokens. A number that the user enters is rounded up to a multiple of 256."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setRange(STEP, MAX_TOKENS)
        self.setSingleStep(STEP)
        # With tracking, "8192" would be reported as 8, 81, 819 and 8192, and a plan made for each.
        self.setKeyboardTracking(False)
        self.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.setAccelerated(True)
        self.lineEdit().setAcceptDrops(False)  # Dropped files are for the window.
        self.fit_width()
        # With the value entered, Ctrl+Z is for the layout again and no longer for the typed text.
        self.lineEdit().returnPressed.connect(self.clearFocus)

    def fit_width(self) -> None:
        """Set the width of the box so that the longest usual number fits in the present font."""
        # The stylesheet sets the font when the widget is polished, which otherwise happens when it is first shown.
        self.ensurePolished()
        self.setFixedWidth(self.fontMetrics().horizontalAdvance(format_count(8 * 131072)) + zoomed(PADDING))

    def textFromValue(self, value: int) -> str:
        return format_count(value)

    def valueFromText(self, text: str) -> int:
        try:
            typed = parse_count(text)
        except ValueError:
            return self.value()
        # Rounded up: llama.cpp pads `n_ctx` to a multiple of 256, and fewer tokens than typed would be a surprise.
        return min(max(-(-typed // STEP), 1) * STEP, MAX_TOKENS)

    def validate(self, text: str, position: int) -> tuple[QValidator.State, str, int]:
        try:
            parse_count(text)
        except ValueError:
            # A beginning of "1.5k" or "16 384" is no count yet. Other letters are refused as they are typed.
            can_begin = all(character in _COUNT_CHARACTERS for character in text)
            state = QValidator.State.Intermediate if can_begin else QValidator.State.Invalid
            return state, text, position
        return QValidator.State.Acceptable, text, position

    def fixup(self, text: str) -> str:
        """Return the text of the present value, which replaces typed text that is not a number."""
        return self.textFromValue(self.value())


MOST_SHOWN = 1 << 20
"""Maximum of the box of a `NumberControl`. A larger value from a file is kept until the user enters another one."""


class SettingControl(QObject):
    """The widgets for the value of one setting. `edited` is emitted if the user changes the value.

    The caller lays out `widgets` side by side.
    """

    edited = Signal()

    def __init__(self, *widgets: QWidget) -> None:
        super().__init__()
        self.widgets = widgets

    def value(self) -> Value:
        """Return the entered value."""
        raise NotImplementedError

    def show_value(self, value: Value, decided: Decision | None) -> None:
        """Show `value` without emitting a signal.

        `decided`: the value that Layerdeck has chosen if `value` is "auto", with the reason. Only a `LengthControl`
        shows it.
        """
        raise NotImplementedError

    def disable_choices(self, refused: Mapping[str, str]) -> None:
        """Disable values that cannot be used.

        `refused`: maps the text of each such value to the reason.

        This method does nothing in a control without a list of values.
        """


class ChoiceControl(SettingControl):
    """A combo box with the values of a setting of the kind `Choice` or `Switch`."""

    def __init__(self, name: str, kind: Choice | Switch) -> None:
        self.box = ComboBox()
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
        """Disable refused values, with the reason as tooltip. The present value stays enabled."""
        # A combo box without a model of its own has a `QStandardItemModel`, whose items can be disabled.
        model = cast(QStandardItemModel, self.box.model())
        for index in range(self.box.count()):
            reason = refused.get(self.box.itemText(index))
            item = model.item(index)
            # A disabled current entry would look as if the whole box were disabled.
            item.setEnabled(reason is None or index == self.box.currentIndex())
            item.setData(plain_tool_tip(reason or ""), Qt.ItemDataRole.ToolTipRole)


class NumberControl(SettingControl):
    """A box for a whole number. If the setting may be automatic, the lowest value of the box is "auto"."""

    def __init__(self, name: str, kind: WholeNumber) -> None:
        self.box = _number_box(name, kind)
        super().__init__(self.box)
        self._open_value = kind.open_value
        self._asked: Value = None
        self._shown = self.box.value()
        self.box.valueChanged.connect(self.edited)

    def value(self) -> Value:
        # Without an entry the original value stays: the range of the box may be narrower than that of the setting.
        if self.box.value() == self._shown:
            return self._asked
        return self._open_value.kept if self._open_value is not None and not self.box.value() else self.box.value()

    def show_value(self, value: Value, decided: Decision | None) -> None:
        number = 0 if self._open_value is not None and value == self._open_value.kept else value
        self._asked, self._shown = value, _show_value(self.box, number)


class RealControl(SettingControl):
    """A box for a number with up to six decimals."""

    def __init__(self, name: str, kind: Real) -> None:
        self.box = DoubleSpinBox()
        # 1/32 has five, as a RoPE scale.
        self.box.setDecimals(6)
        self.box.setRange(kind.low, kind.high)
        self.box.setSingleStep(kind.step)
        self.box.setSpecialValueText(kind.low_word)
        self.box.setKeyboardTracking(False)
        self.box.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.box.setAccessibleName(name)
        super().__init__(self.box)
        self._asked: Value = None
        self._shown = self.box.value()
        self.box.valueChanged.connect(self.edited)

    def value(self) -> Value:
        # The box rounds to its decimals; a value that nobody changed stays as it was.
        return self._asked if self.box.value() == self._shown else self.box.value()

    def show_value(self, value: Value, decided: Decision | None) -> None:
        number = value if isinstance(value, int | float) else self.box.minimum()
        self._asked, self._shown = value, show_real(self.box, number)


class LengthControl(SettingControl):
    """A box for a length in tokens, with a button "Auto". While that is on, the box shows the automatic length."""

    def __init__(self, name: str, kind: WholeNumber) -> None:
        self.auto_button = QToolButton()
        self.auto_button.setText(AUTO.capitalize())
        self.auto_button.setCheckable(True)
        self.auto_button.setProperty("role", "segment")
        self.box = TokenSpinBox()
        self.box.setAccessibleName(name)
        super().__init__(self.auto_button, self.box)
        assert kind.open_value is not None
        self._open_value = kind.open_value.kept
        self._asked: Value = None
        self._shown = self.box.value()
        self.auto_button.toggled.connect(self.edited)
        self.box.valueChanged.connect(self.edited)

    def value(self) -> Value:
        if self.auto_button.isChecked():
            return self._open_value
        # After "Auto" is switched off, the length begins with the one that was in use.
        is_asked = self.box.value() == self._shown and self._asked != self._open_value
        return self._asked if is_asked else self.box.value()

    def show_value(self, value: Value, decided: Decision | None) -> None:
        is_open = value == self._open_value
        used = decided.value if decided is not None else value
        self._asked, self._shown = value, _show_value(self.box, used if is_open else value)
        # `toggled` is emitted for `setChecked` as well, and would be reported as an edit.
        blocked = self.auto_button.blockSignals(True)
        self.auto_button.setChecked(is_open)
        self.auto_button.blockSignals(blocked)
        self.box.setEnabled(not is_open)


def make_control(setting: Setting) -> SettingControl:
    """Return a new control for the kind of value that `setting` has."""
    kind, name = setting.kind, setting.label
    if isinstance(kind, Real):
        return RealControl(name, kind)
    if not isinstance(kind, WholeNumber):
        return ChoiceControl(name, kind)
    # Of the numbers in the table only the context length has a step of more than 1.
    return LengthControl(name, kind) if kind.step > 1 else NumberControl(name, kind)


def _number_box(name: str, kind: WholeNumber) -> QSpinBox:
    """Return a box for a whole number; 0 stands for automatic if the setting allows that."""
    box = SpinBox()
    # `setSpecialValueText` is shown for the minimum, which is why 0 stands for automatic.
    box.setRange(kind.low if kind.open_value is None else 0, min(kind.high, MOST_SHOWN))
    if kind.open_value is not None:
        box.setSpecialValueText(AUTO)
    box.setKeyboardTracking(False)
    box.setAlignment(Qt.AlignmentFlag.AlignCenter)
    box.setAccessibleName(name)
    return box


def _show_value(box: QSpinBox, value: Value) -> int:
    """Show `value`, or 0 if it is not a whole number. Return the number that the box then has, within its range."""
    return show_number(box, value if isinstance(value, int) else 0)
