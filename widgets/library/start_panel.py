"""What a newcomer sees instead of an empty list."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QPushButton, QVBoxLayout, QWidget

from engine.language import tr
from widgets.common.roles import plain_label


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
