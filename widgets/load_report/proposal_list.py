"""What to change after a load that did not fit: a row for each, with the button that applies it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from engine.language import tr
from widgets.common.roles import plain_label
from widgets.load_report.outcome import ProposalWords


class ProposalList(QWidget):
    """Rows in the order given, least harmful first."""

    chosen = Signal(int)  # the place of the proposal in the list

    def __init__(self, proposals: Sequence[ProposalWords], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.buttons: list[QPushButton] = []
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(4)
        for index, words in enumerate(proposals):
            column.addWidget(self._row(index, words))

    def _row(self, index: int, words: ProposalWords) -> QFrame:
        frame = QFrame()
        frame.setProperty("role", "card")
        row = QHBoxLayout(frame)
        row.setContentsMargins(8, 4, 4, 4)
        row.setSpacing(12)
        row.addWidget(_text(words.text, "strong"), 4)
        row.addWidget(_text(words.detail, "dim"), 5)
        button = QPushButton(tr("Apply"))
        button.setProperty("role", "primary")
        button.setAccessibleName(tr("Apply: {text}", text=words.text))
        button.setToolTip(tr("Change the layout like this; Undo goes back. Nothing is loaded yet."))
        button.clicked.connect(partial(self.chosen.emit, index))
        row.addWidget(button, 0, Qt.AlignmentFlag.AlignVCenter)
        self.buttons.append(button)
        return frame


def _text(text: str, role: str) -> QLabel:
    label = plain_label(text, role, wrap=True)
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label
