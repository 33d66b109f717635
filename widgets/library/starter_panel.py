"""What an empty library offers: three models to begin with, a folder to add, a file to open."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from engine.language import tr
from engine.library.starters import Starter
from engine.units import format_bytes
from widgets.common.roles import plain_label

_WIDTH = 760
PURPOSE_LINES = 3


class StarterPanel(QWidget):
    """Cards beside each other in the middle."""

    starter_chosen = Signal(Starter)
    add_folder_requested = Signal()
    open_requested = Signal()
    try_demo_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.cards: list[QPushButton] = []
        self._row = QHBoxLayout()
        self._row.setSpacing(12)
        self.folder_button = QPushButton(tr("Add a folder…"))
        self.open_button = QPushButton(tr("Open a file…"))
        self.demo_button = QPushButton(tr("Try the demo model"))
        self.folder_button.clicked.connect(self.add_folder_requested.emit)
        self.open_button.clicked.connect(self.open_requested.emit)
        self.demo_button.clicked.connect(self.try_demo_requested.emit)
        buttons = QHBoxLayout()
        buttons.setSpacing(8)
        for button in (self.folder_button, self.open_button, self.demo_button):
            buttons.addWidget(button)
        buttons.addStretch(1)
        middle = QWidget()
        middle.setMaximumWidth(_WIDTH)
        column = QVBoxLayout(middle)
        column.setSpacing(12)
        column.addWidget(plain_label(tr("No models yet"), "title"))
        places = tr(
            "Folders that you add are looked into, and what Hugging Face, LM Studio, Ollama and llama.cpp keep."
        )
        column.addWidget(plain_label(places, "dim", wrap=True))
        column.addLayout(buttons)
        column.addSpacing(12)
        self._heading = plain_label(tr("Small models that fit this machine"), "strong")
        column.addWidget(self._heading)
        column.addLayout(self._row)
        across = QHBoxLayout()
        across.addStretch(1)
        across.addWidget(middle, 8)
        across.addStretch(1)
        outer = QVBoxLayout(self)
        outer.addStretch(1)
        outer.addLayout(across)
        outer.addStretch(2)

    def show_starters(self, starters: Sequence[Starter]) -> None:
        """Offer these models."""
        while (item := self._row.takeAt(0)) is not None:
            widget = item.widget()
            if widget is not None:
                widget.deleteLater()
        self.cards = []
        for starter in starters:
            self._row.addWidget(self._card(starter), 1)
        self._heading.setVisible(bool(starters))

    def _card(self, starter: Starter) -> QFrame:
        card = QFrame()
        card.setProperty("role", "card")
        button = QPushButton(tr("Get it"))
        button.setAccessibleName(tr("Get {name}", name=starter.name))
        button.setToolTip(starter.address)
        button.clicked.connect(lambda: self.starter_chosen.emit(starter))
        self.cards.append(button)
        column = QVBoxLayout(card)
        column.addWidget(plain_label(starter.name, "strong"))
        purpose = plain_label(starter.purpose, "dim", wrap=True)
        purpose.setAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop)
        purpose.setMinimumHeight(PURPOSE_LINES * purpose.fontMetrics().lineSpacing())
        column.addWidget(purpose, 1)
        column.addWidget(plain_label(tr("{size} to download", size=format_bytes(starter.size_bytes)), "dim"))
        column.addWidget(button)
        return card
