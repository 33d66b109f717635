"""Load, Cancel and Unload, with the progress of a load below them."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QPushButton, QVBoxLayout, QWidget

from engine.language import tr
from engine.session.status import ModelStatus, Phase
from widgets.common.tool_tips import plain_tool_tip
from widgets.controls.metrics import CONTROL_HEIGHT_PX

PROGRESS_STEPS = 1000


def load_words(status: ModelStatus) -> tuple[str, str]:
    """Return the text of the load button and its tool tip."""
    if status.is_loading:
        return tr("Load"), ""
    if status.phase is Phase.STOPPING:
        return tr("Load"), tr("One moment")
    if not status.is_loaded:
        return tr("Load"), tr("Load the model as laid out") if status.name else tr("Open a model first")
    if status.is_edited:
        return tr("Reload"), tr("Replace what is loaded by what is shown")
    return tr("Loaded"), tr("The model is loaded as shown")


class LoadButtons(QWidget):
    """Offers what the status of the current model allows."""

    load_requested = Signal()
    cancel_requested = Signal()
    unload_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.load_button = QPushButton(tr("Load"))
        self.load_button.setProperty("role", "good")
        self.cancel_button = QPushButton(tr("Cancel"))
        self.cancel_button.setProperty("role", "primary")
        self.unload_button = QPushButton(tr("Unload"))
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.progress.setAccessibleName(tr("Load progress"))
        keep = self.progress.sizePolicy()
        keep.setRetainSizeWhenHidden(True)
        self.progress.setSizePolicy(keep)
        for button in (self.load_button, self.cancel_button):
            button.setMinimumWidth(100)
        for button in (self.load_button, self.cancel_button, self.unload_button):
            # A click leaves the focus where it was: these buttons hide and go grey, and focus would jump on.
            button.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        row = QHBoxLayout()
        row.setSpacing(8)
        for button in (self.unload_button, self.cancel_button, self.load_button):
            button.setFixedHeight(CONTROL_HEIGHT_PX)
            row.addWidget(button)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(2)
        layout.addLayout(row)
        layout.addWidget(self.progress)
        self.load_button.clicked.connect(self.load_requested.emit)
        self.cancel_button.clicked.connect(self.cancel_requested.emit)
        self.unload_button.clicked.connect(self.unload_requested.emit)
        self.set_status(ModelStatus())

    def set_status(self, status: ModelStatus) -> None:
        """Offer what `status` allows."""
        text, tool_tip = load_words(status)
        self.load_button.setText(text)
        self.load_button.setEnabled(status.can_load)
        self.load_button.setToolTip(plain_tool_tip(tool_tip))
        self.load_button.setVisible(not status.is_loading)
        self.cancel_button.setVisible(status.is_loading)
        self.unload_button.setVisible(status.is_loaded and not status.is_loading)
        self.progress.setVisible(status.is_loading)
        if not status.is_loading:
            self.set_progress(None, "")

    def set_progress(self, fraction: float | None, text: str) -> None:
        """Show the progress of a load; None is work of unknown length, `text` says what goes on."""
        self.progress.setRange(0, 0 if fraction is None else PROGRESS_STEPS)
        if fraction is not None:
            self.progress.setValue(round(min(max(fraction, 0.0), 1.0) * PROGRESS_STEPS))
        self.progress.setToolTip(plain_tool_tip(text))
        self.cancel_button.setToolTip(plain_tool_tip(text))
