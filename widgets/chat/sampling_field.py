"""The control for one setting of a sampler, by the kind of its value."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, Signal
from PySide6.QtWidgets import QComboBox, QHBoxLayout, QLineEdit, QPlainTextEdit, QWidget

from engine.settings.kinds import Choice, Text, Texts
from engine.settings.sampling_table import SamplingSetting
from widgets.common.tool_tips import plain_tool_tip

LONG_LINES = 3
AROUND_PX = 20


class SamplingField(QWidget):
    """Tells what was typed when it is left or Enter is pressed, not on the way there."""

    committed = Signal(str)

    def __init__(self, setting: SamplingSetting, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._shown = ""
        self.control: QComboBox | QPlainTextEdit | QLineEdit
        kind = setting.kind
        if isinstance(kind, Choice):
            self.control = QComboBox()
            self.control.addItems(kind.words)
            self.control.activated.connect(self._commit)
        elif isinstance(kind, Texts | Text):
            self.control = QPlainTextEdit()
            self.control.setTabChangesFocus(True)
            self.setFixedHeight(lines_height(self, LONG_LINES))
            self.control.installEventFilter(self)
        else:
            self.control = QLineEdit()
            self.control.editingFinished.connect(self._commit)
        self.control.setAccessibleName(setting.label)
        self.control.setToolTip(plain_tool_tip(f"{setting.help}\n{kind.allowed}"))
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.addWidget(self.control)

    @property
    def text(self) -> str:
        """What is typed now."""
        match self.control:
            case QComboBox():
                return self.control.currentText()
            case QPlainTextEdit():
                return self.control.toPlainText()
            case _:
                return self.control.text()

    def show_text(self, text: str) -> None:
        """Show the value that holds."""
        self._shown = text
        if self.text == text:
            return
        match self.control:
            case QComboBox():
                self.control.setCurrentText(text)
            case QPlainTextEdit():
                self.control.setPlainText(text)
            case _:
                self.control.setText(text)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Long texts are told when the keyboard leaves them."""
        if event.type() is QEvent.Type.FocusOut:
            self._commit()
        return super().eventFilter(watched, event)

    def _commit(self) -> None:
        if self.text != self._shown:
            self._shown = self.text
            self.committed.emit(self.text)


def lines_height(widget: QWidget, lines: int) -> int:
    """Return the height of an editor that shows so many lines, for the widget around it.

    The stylesheet gives editors a least height of their own, which a layout prefers to what they ask for.
    """
    return lines * widget.fontMetrics().lineSpacing() + AROUND_PX
