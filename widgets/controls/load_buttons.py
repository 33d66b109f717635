"""Load, Cancel and Unload, with the progress of a load below them."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QPushButton, QVBoxLayout, QWidget

from engine.language import tr
from widgets.common.tool_tips import plain_tool_tip
from widgets.controls.metrics import CONTROL_HEIGHT_PX
from widgets.controls.states import LoadState

PROGRESS_STEPS = 1000


@dataclass(frozen=True, slots=True)
class _Offer:
    load_text: str
    load: bool
    cancel: bool
    unload: bool
    tool_tip: str


_OFFERS = {
    LoadState.NO_MODEL: _Offer(tr("Load"), False, False, False, tr("Open a model first")),
    LoadState.IDLE: _Offer(tr("Load"), True, False, False, tr("Load the model as laid out")),
    LoadState.LOADING: _Offer(tr("Load"), False, True, False, ""),
    LoadState.LOADED: _Offer(tr("Loaded"), False, False, True, tr("The model is loaded as shown")),
    LoadState.EDITED: _Offer(tr("Reload"), True, False, True, tr("Replace what is loaded by what is shown")),
    LoadState.BUSY: _Offer(tr("Load"), False, False, False, tr("One moment")),
}


class LoadButtons(QWidget):
    """Offers what can be asked in the current state."""

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
        self.set_state(LoadState.NO_MODEL)

    def set_state(self, state: LoadState) -> None:
        """Offer what `state` allows."""
        offer = _OFFERS[state]
        self.load_button.setText(offer.load_text)
        self.load_button.setEnabled(offer.load)
        self.load_button.setToolTip(plain_tool_tip(offer.tool_tip))
        self.load_button.setVisible(not offer.cancel)
        self.cancel_button.setVisible(offer.cancel)
        self.unload_button.setVisible(offer.unload)
        self.progress.setVisible(state is LoadState.LOADING)
        if state is not LoadState.LOADING:
            self.set_progress(None, "")

    def set_progress(self, fraction: float | None, text: str) -> None:
        """Show the progress of a load; None is work of unknown length, `text` says what goes on."""
        self.progress.setRange(0, 0 if fraction is None else PROGRESS_STEPS)
        if fraction is not None:
            self.progress.setValue(round(min(max(fraction, 0.0), 1.0) * PROGRESS_STEPS))
        self.progress.setToolTip(plain_tool_tip(text))
        self.cancel_button.setToolTip(plain_tool_tip(text))
