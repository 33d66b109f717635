"""What a newcomer sees: the welcome in the middle of the window, and the side panel before any model was opened."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QPushButton, QScrollArea, QVBoxLayout, QWidget

from engine.base.language import tr
from widgets.common.roles import plain_label
from widgets.common.wrap_layout import WrapLayout


class StartPanel(QWidget):
    """One click to something that works, one to open a file."""

    try_demo_requested = Signal()
    open_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.try_demo_button = QPushButton(tr("Try the demo model\non a lab rig"))
        self.try_demo_button.setToolTip(
            tr("Writes a small model and starts three local workers that stand for devices. Nothing is downloaded.")
        )
        self.open_button = QPushButton(tr("Open a model…"))
        self.try_demo_button.clicked.connect(self.try_demo_requested.emit)
        self.open_button.clicked.connect(self.open_requested.emit)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 8, 0, 0)
        layout.setSpacing(8)
        layout.addWidget(plain_label(tr("No models yet"), "strong"))
        layout.addWidget(plain_label(tr("Open a GGUF file, or drop one on the window."), "dim", wrap=True))
        layout.addWidget(self.open_button)
        layout.addSpacing(8)
        layout.addWidget(
            plain_label(tr("No model or no GPU at hand? Nothing needs to be downloaded:"), "dim", wrap=True)
        )
        layout.addWidget(self.try_demo_button)
        layout.addStretch(1)


NOTHING_SENT = tr("No account, no telemetry. Nothing is asked of the network unless you ask for it.")
_TALKS = tr("A small model that is here already, on workers that stand for three cards.")
_BABBLES = tr("A made-up model shows how layers are placed; it babbles. The library offers small ones that answer.")
MAX_WIDTH_PX = 560
"""Longer lines are hard to read."""


class WelcomePanel(QScrollArea):
    """Says what it is told, and what people want."""

    talk_requested = Signal()
    open_requested = Signal()
    library_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setAccessibleName(tr("Welcome"))
        self.talk_button = QPushButton()
        self.talk_button.setProperty("role", "primary")
        self.open_button = QPushButton(tr("Open a model…"))
        self.library_button = QPushButton(tr("Library…"))
        self.talk_button.clicked.connect(self.talk_requested)
        self.open_button.clicked.connect(self.open_requested)
        self.library_button.clicked.connect(self.library_requested)
        self._machine = plain_label(wrap=True)
        self._demo = plain_label(role="dim", wrap=True)
        self._places = plain_label(role="dim", wrap=True)
        self._build()
        self.show_demo(speaks=False)

    @property
    def text(self) -> str:
        """What is said, a line for each label."""
        return "\n".join(label.text() for label in (self._machine, self._demo, self._places))

    def show_machine(self, lines: Sequence[str]) -> None:
        """Say what this computer has."""
        self._machine.setText("\n".join(lines))

    def show_demo(self, *, speaks: bool) -> None:
        """Say what the first button opens: a model that answers, or the one that is made up."""
        self.talk_button.setText(tr("Talk to a small model") if speaks else tr("Try the made-up model"))
        self._demo.setText(_TALKS if speaks else _BABBLES)

    def show_places(self, text: str) -> None:
        """Say where models and conversations are kept."""
        self._places.setText(text)

    def _build(self) -> None:
        buttons = WrapLayout(spacing=8)
        for button in (self.talk_button, self.open_button, self.library_button):
            buttons.addWidget(button)
        words = QWidget()
        words.setMaximumWidth(MAX_WIDTH_PX)
        column = QVBoxLayout(words)
        column.setContentsMargins(0, 0, 8, 0)
        column.setSpacing(10)
        column.addStretch(2)
        column.addWidget(plain_label(tr("Welcome to Layerdeck"), "title"))
        column.addWidget(self._machine)
        column.addLayout(buttons)
        column.addWidget(self._demo)
        column.addSpacing(4)
        column.addWidget(self._places)
        column.addWidget(plain_label(NOTHING_SENT, "dim", wrap=True))
        column.addStretch(3)
        content = QWidget()
        around = QHBoxLayout(content)
        around.setContentsMargins(0, 0, 0, 0)
        around.addStretch(1)
        around.addWidget(words, 1000)
        around.addStretch(1)
        self.setWidget(content)
