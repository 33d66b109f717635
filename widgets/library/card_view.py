"""A repository's card: a few facts over its text, which is a stranger's: no HTML, nothing fetched, links on a click."""

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

_READING = tr("Reading the card…")


class CardView(QScrollArea):
    """Shows one card; `clear` until it is there."""

    link_opened = Signal(str)
    save_requested = Signal(str, str)
    """Code and the name of its language."""

    def __init__(self, typesetter: Typesetter, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.facts = QFormLayout()
        self.note_label = plain_label("", "dim", wrap=True)
        self.text_view = MarkdownView(typesetter)
        self.text_view.link_opened.connect(self.link_opened.emit)
        self.text_view.save_requested.connect(self.save_requested.emit)
        self.text_view.height_changed.connect(self._fit)
        self.text_view.setAccessibleName(tr("Text of the model card"))
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
        """Show that a card is on its way."""
        self.show_card(ShownCard("", (), "", _READING))

    def show_card(self, card: ShownCard) -> None:
        """Show `card` from its beginning."""
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
        """Lay the text out for the new width."""
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        margins = self._column.contentsMargins()
        width = max(120, self.viewport().width() - margins.left() - margins.right())
        self.text_view.setFixedHeight(max(1, self.text_view.fit(width)))
