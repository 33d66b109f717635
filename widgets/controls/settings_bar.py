"""The settings bar: which model, how it is split, with what context, and the load buttons."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QWidget

from engine.layout.layout import SplitMode
from engine.plan.decisions.decision import Decision
from engine.session.status import ModelStatus
from engine.settings.context_settings import ContextSettings
from widgets.common.wrap_layout import WrapLayout
from widgets.controls.context_editor import ContextEditor
from widgets.controls.load_buttons import LoadButtons
from widgets.controls.model_button import ModelButton
from widgets.controls.split_mode_chooser import SplitModeChooser
from widgets.controls.states import SplitModeChoice


class SettingsBar(QFrame):
    """Shows what it is told and reports what the person asks for; wraps into two lines when the window is narrow."""

    context_changed = Signal(ContextSettings)
    split_mode_changed = Signal(SplitModeChoice)
    load_requested = Signal()
    cancel_requested = Signal()
    unload_requested = Signal()
    model_menu_requested = Signal()
    all_settings_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("settings-bar")
        self.model_button = ModelButton()
        self.split_chooser = SplitModeChooser()
        self.context_editor = ContextEditor(self)
        self.load_buttons = LoadButtons()
        settings = WrapLayout(spacing=8)
        for widget in (self.model_button, self.split_chooser, *self.context_editor.groups):
            settings.addWidget(widget)
        self._row = layout = QHBoxLayout(self)
        layout.setContentsMargins(12, 4, 12, 4)
        layout.setSpacing(12)
        layout.addLayout(settings, 1)
        layout.addWidget(self.load_buttons, 0, Qt.AlignmentFlag.AlignTop)
        self.model_button.clicked.connect(self.model_menu_requested.emit)
        self.split_chooser.mode_chosen.connect(self.split_mode_changed)
        self.context_editor.context_changed.connect(self.context_changed)
        self.context_editor.all_requested.connect(self.all_settings_requested)
        self.load_buttons.load_requested.connect(self.load_requested)
        self.load_buttons.cancel_requested.connect(self.cancel_requested)
        self.load_buttons.unload_requested.connect(self.unload_requested)

    def set_model_text(self, name: str, detail: str) -> None:
        """Name the open model; an empty name: there is none."""
        self.model_button.set_text(name, detail)

    def set_context(
        self, settings: ContextSettings, n_ctx_train: int | None = None, decisions: tuple[Decision, ...] = ()
    ) -> None:
        """Show `settings` and what was decided; `n_ctx_train`: the length trained for, None when unknown."""
        self.context_editor.set_settings(settings, n_ctx_train, decisions)

    def set_split_mode(self, mode: SplitMode, disabled: Mapping[SplitMode, str] | None = None) -> None:
        """Show `mode` as chosen; `disabled` maps modes that cannot be had to the reason."""
        self.split_chooser.set_mode(mode, disabled or {})

    def set_status(self, status: ModelStatus) -> None:
        """Offer what the status of the current model allows; settings stay editable, for the next load."""
        self.load_buttons.set_status(status)
        self._fit_height()

    def set_progress(self, fraction: float | None, text: str = "") -> None:
        """Show the progress of a load; None is work of unknown length."""
        self.load_buttons.set_progress(fraction, text)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit_height()

    def _fit_height(self) -> None:
        # Fixed, because tool bars and docks around it do not ask for a height by width.
        height = self._row.heightForWidth(self.width())
        if height > 0 and height != self.height():
            self.setFixedHeight(height)
