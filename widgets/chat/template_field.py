"""Which chat template a conversation is written with: the model's own, one that is well known, or any other text."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import QTimer, Signal
from PySide6.QtWidgets import QComboBox, QPlainTextEdit, QVBoxLayout, QWidget

from engine.language import tr
from widgets.chat.sampling_field import lines_height

OF_MODEL, OTHER = tr("The model's own"), tr("Another one")
EDIT_DELAY_MS = 800
EDIT_LINES = 6


class TemplateField(QWidget):
    """A choice, and the text of what is chosen, which may be changed."""

    template_changed = Signal(str)
    """The text; empty: the model's own."""

    def __init__(self, known: Mapping[str, str], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._known = dict(known)
        self.choice_box = QComboBox()
        self.choice_box.setAccessibleName(tr("Chat template"))
        self.choice_box.setAccessibleDescription(tr("Chat template"))
        for name in (OF_MODEL, *self._known, OTHER):
            self.choice_box.addItem(name)
        self.text_edit = QPlainTextEdit()
        self.text_edit.setAccessibleName(tr("Text of the chat template (Jinja)"))
        self.text_edit.setTabChangesFocus(True)
        self.text_edit.setFixedHeight(lines_height(self, EDIT_LINES))
        self._is_showing = False
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(EDIT_DELAY_MS)
        self._timer.timeout.connect(self._tell)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(4)
        column.addWidget(self.choice_box)
        column.addWidget(self.text_edit)
        self.choice_box.activated.connect(self._on_chosen)
        self.text_edit.textChanged.connect(self._on_typed)
        self.show_template("")

    def show_template(self, text: str) -> None:
        """Show the conversation's own template; empty: it has none."""
        names = {template: name for name, template in self._known.items()}
        self._is_showing = True
        if text or self.choice_box.currentText() != OTHER:
            self.choice_box.setCurrentText(names.get(text, OTHER) if text else OF_MODEL)
        if self.text_edit.toPlainText() != text:
            self.text_edit.setPlainText(text)
        self._is_showing = False
        self.text_edit.setVisible(self.choice_box.currentText() != OF_MODEL)

    def flush(self) -> None:
        """Tell what is typed and not told yet."""
        if self._timer.isActive():
            self._tell()

    def _tell(self) -> None:
        self._timer.stop()
        self.template_changed.emit(self.text_edit.toPlainText())

    def _on_chosen(self) -> None:
        name = self.choice_box.currentText()
        text = "" if name == OF_MODEL else self._known.get(name, self.text_edit.toPlainText())
        self.text_edit.setVisible(name != OF_MODEL)
        self._timer.stop()
        self.template_changed.emit(text)

    def _on_typed(self) -> None:
        if not self._is_showing and not self._timer.isActive():
            self._timer.start()
