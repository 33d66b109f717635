"""The widget for a model card. Its text is untrusted: no HTML, no remote content, and links open on a click only."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QFormLayout, QScrollArea, QVBoxLayout, QWidget

from engine.base.language import tr
from widgets.common.elided_label import ElidedLabel
from widgets.common.roles import plain_label
from widgets.library.find_values import ShownCard
from widgets.markdown.typesetter import Typesetter
from widgets.markdown.view import MarkdownView

_READING = tr("Reading the model card…")


class CardView(QScrollArea):
    """Scroll area with one model card. After `clear` it says that the card is being read."""

    link_opened = Signal(str)
    # Text of a code block, and its language.
    save_requested = Signal(str, str)

    def __init__(self, typesetter: Typesetter, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.facts = QFormLayout()
        self.note_label = plain_label("", "dim", wrap=True)
        self.text_view = MarkdownView(typesetter)
        self.text_view.link_opened.connect(self.link_opened.emit)
        self.text_view.save_requested.connect(self.save_requested.emit)
        # Text is parsed in another thread, so its height is known only later.
        self.text_view.height_changed.connect(self._fit)
        self.text_view.setAccessibleName(tr("Model card text"))
        self.setAccessibleName(tr("Model card"))
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._content = QWidget()
        column = self._column = QVBoxLayout(self._content)
        column.setContentsMargins(0, 0, 12, 0)
        column.setSpacing(10)
        self.facts.setContentsMargins(0, 0, 0, 0)
        self.facts.setHorizontalSpacing(16)
        self.facts.setVerticalSpacing(3)
        self.facts.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.ExpandingFieldsGrow)
        column.addLayout(self.facts)
        column.addWidget(self.note_label)
        column.addWidget(self.text_view)
        column.addStretch(1)
        self.setWidget(self._content)
        self.clear()

    def clear(self) -> None:
        """Show that the model card is being read."""
        self.show_card(ShownCard("", (), "", _READING))

    def show_card(self, card: ShownCard) -> None:
        """Show a model card: its table of names and values, its note and its text, scrolled to the start."""
        # `removeRow` also deletes the widgets of the row; `takeRow` would leave them.
        while self.facts.rowCount():
            self.facts.removeRow(0)
        for name, value in card.facts:
            self.facts.addRow(plain_label(name, "dim"), ElidedLabel(value))
        self.note_label.setText(card.note)
        self.note_label.setVisible(bool(card.note))
        self.text_view.set_text(card.text)
        self.text_view.setVisible(bool(card.text))
        self.verticalScrollBar().setValue(0)
        self._fit()

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Lay out the text for the new width."""
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        margins = self._column.contentsMargins()
        # The view has no height for width, so it is laid out for the width of the viewport. At least 120 pixels: before
        # the page is laid out, the viewport may be so narrow that each line would have a few letters.
        width = max(120, self.viewport().width() - margins.left() - margins.right())
        self.text_view.setFixedHeight(max(1, self.text_view.fit(width)))
