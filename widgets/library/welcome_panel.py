"""The welcome page in the middle of the window, and the side panel before any model was opened."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QPushButton, QScrollArea, QWidget

from engine.base.language import tr
from widgets.common.boxes import centred, v_box
from widgets.common.roles import plain_label
from widgets.common.wrap_layout import WrapLayout


class StartPanel(QWidget):
    """The side panel before any model was opened.

    The welcome page next to it has the button that opens a file, so this panel has none.
    """

    try_demo_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.try_demo_button = QPushButton(tr("Try the demo model\non simulated devices"))
        self.try_demo_button.setToolTip(
            tr("Creates a small model and three simulated devices on this computer. Nothing is downloaded.")
        )
        self.try_demo_button.clicked.connect(self.try_demo_requested.emit)
        layout = v_box(self, spacing=8, margins=(0, 8, 0, 0))
        layout.addWidget(plain_label(tr("No models yet"), "strong"))
        words = tr("Models that you open are listed here. You can also drop a GGUF file onto the window.")
        layout.addWidget(plain_label(words, "dim", wrap=True))
        layout.addSpacing(8)
        layout.addWidget(plain_label(tr("No model, or no GPU? The demo model needs no download:"), "dim", wrap=True))
        layout.addWidget(self.try_demo_button)
        layout.addStretch(1)


NOTHING_SENT = tr("No account, no telemetry. Layerdeck goes online only when you ask for it.")
_TALKS = tr("Uses a small included model on three simulated devices.")
_BABBLES = tr(
    "The demo model shows how layers are placed, but its answers make no sense. The library has small models that "
    "give useful answers."
)
# Widest text in pixels: longer lines are hard to read.
MAX_WIDTH_PX = 560


class WelcomePanel(QScrollArea):
    """The welcome page: this computer, buttons for a first model, and where data is stored."""

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
        self._folders = plain_label(role="dim", wrap=True)
        self._build()
        self.show_demo(speaks=False)

    @property
    def text(self) -> str:
        """All texts of the page, one line for each label."""
        return "\n".join(label.text() for label in (self._machine, self._demo, self._folders))

    def show_machine(self, lines: Sequence[str]) -> None:
        """Show `lines` of text about this computer, such as its devices."""
        self._machine.setText("\n".join(lines))

    def show_demo(self, *, speaks: bool) -> None:
        """Show which demo model the first button opens.

        `speaks`: whether it is a small real model; if not, it is a generated model whose answers make no sense.
        """
        self.talk_button.setText(tr("Chat with a small model") if speaks else tr("Try the demo model"))
        self._demo.setText(_TALKS if speaks else _BABBLES)

    def show_folders(self, text: str) -> None:
        """Show where models and conversations are stored."""
        self._folders.setText(text)

    def _build(self) -> None:
        buttons = WrapLayout(spacing=8)
        for button in (self.talk_button, self.open_button, self.library_button):
            buttons.addWidget(button)
        words = QWidget()
        words.setMaximumWidth(MAX_WIDTH_PX)
        column = v_box(words, spacing=10, margins=(0, 0, 8, 0))
        column.addStretch(2)
        column.addWidget(plain_label(tr("Welcome to Layerdeck"), "title"))
        column.addWidget(self._machine)
        column.addLayout(buttons)
        column.addWidget(self._demo)
        column.addSpacing(4)
        column.addWidget(self._folders)
        column.addWidget(plain_label(NOTHING_SENT, "dim", wrap=True))
        column.addStretch(3)
        content = QWidget()
        centred(words, content)
        self.setWidget(content)
