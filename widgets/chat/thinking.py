"""What a model thought before it answered: folded, with how long that took."""

from __future__ import annotations

from PySide6.QtCore import QRectF, Signal
from PySide6.QtGui import QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import QToolButton, QWidget

from engine.language import tr
from widgets.markdown.typesetter import Typesetter
from widgets.markdown.view import MarkdownView

ROW_PX = 24
INSET_PX = 14


class ThinkingBox(QWidget):
    """A line that unfolds. While it thinks there is a button to have it answer now."""

    answer_now_requested = Signal()
    height_changed = Signal()

    def __init__(self, typesetter: Typesetter, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._typesetter = typesetter
        self._pieces: list[str] = []
        self.fold_button = QToolButton(self)
        self.fold_button.setProperty("role", "quiet")
        self.fold_button.setCheckable(True)
        self.fold_button.toggled.connect(self._on_toggled)
        self.now_button = QToolButton(self)
        self.now_button.setText(tr("Answer now"))
        self.now_button.setToolTip(tr("End the thinking here and answer with what there is"))
        self.now_button.setProperty("role", "quiet")
        self.now_button.clicked.connect(self.answer_now_requested.emit)
        self.view = MarkdownView(typesetter, self)
        self.view.setAccessibleName(tr("What was thought"))
        self.view.hide()
        self.view.height_changed.connect(self._on_view_height)
        self._note = ""
        self.hide()

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def is_unfolded(self) -> bool:
        return self.fold_button.isChecked()

    def set_text(self, text: str) -> None:
        """Show these thoughts."""
        self._pieces = [text]
        if self.is_unfolded:
            self.view.set_text(text)
        self._refresh()

    def append(self, text: str) -> None:
        """Add to them. Folded ones are not even parsed."""
        is_first = not self.text
        self._pieces.append(text)
        if self.is_unfolded:
            self.view.live.append(text)
        self._refresh()
        if is_first:
            self.height_changed.emit()

    def show_note(self, note: str, *, is_open: bool) -> None:
        """Say how long it took, or that it goes on."""
        self._note = note
        self.now_button.setVisible(is_open)
        self._refresh()

    def fit(self, width: int) -> int:
        """Place everything for this width and return the height."""
        self.fold_button.setGeometry(0, 0, min(self.fold_button.sizeHint().width(), width), ROW_PX)
        self.now_button.setGeometry(self.fold_button.width() + 4, 0, self.now_button.sizeHint().width(), ROW_PX)
        height = ROW_PX
        if self.is_unfolded:
            height += self.view.fit(width - INSET_PX)
            self.view.move(INSET_PX, ROW_PX)
        self.resize(width, height)
        return height

    def paintEvent(self, _event: QPaintEvent) -> None:
        if self.is_unfolded:
            painter = QPainter(self)
            painter.fillRect(QRectF(4, ROW_PX, 2, self.height() - ROW_PX), QColor(self._typesetter.palette.line))
            painter.end()

    def _on_toggled(self, unfolded: bool) -> None:
        if unfolded:
            self.view.set_text(self.text)
        self.view.setVisible(unfolded)
        self._refresh()
        self.height_changed.emit()

    def _on_view_height(self) -> None:
        if self.is_unfolded:
            self.height_changed.emit()

    def _refresh(self) -> None:
        arrow = "▾" if self.is_unfolded else "▸"
        words = f"{arrow} {self._note or tr('Thinking…')}"
        if self.fold_button.text() != words:
            self.fold_button.setText(words)
            self.fold_button.setAccessibleName(tr("Thoughts: {note}", note=self._note or tr("thinking")))
            self.fold_button.resize(self.fold_button.sizeHint().width(), ROW_PX)
