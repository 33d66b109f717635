"""Context length, KV cache types and flash attention of the next load."""

from __future__ import annotations

from typing import cast

import msgspec
from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtWidgets import QComboBox, QHBoxLayout, QMenu, QToolButton, QWidget

from engine.layout.context_settings import KV_TYPES, ContextSettings, FlashAttention, KvType
from widgets.common.counts import format_count
from widgets.common.roles import plain_label
from widgets.controls.metrics import CONTROL_HEIGHT_PX
from widgets.controls.token_spin_box import TokenSpinBox

PRESETS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
FLASH_CHOICES: tuple[FlashAttention, ...] = ("auto", "on", "off")


class ContextEditor(QObject):
    """Edits the parts of `ContextSettings` that the bar shows; the rest passes through unchanged.

    `groups` are the widgets to lay out.
    """

    context_changed = Signal(ContextSettings)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._settings = ContextSettings()
        self._n_ctx_train: int | None = None
        self.n_ctx_box = TokenSpinBox()
        self.n_ctx_box.setAccessibleName("Context length in tokens")
        self.presets_button = QToolButton()
        self.presets_button.setText("▾")
        self.presets_button.setProperty("role", "compact")
        self.presets_button.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextOnly)
        self.presets_button.setAccessibleName("Context length presets")
        self.presets_button.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
        self.presets_button.setMenu(QMenu(self.presets_button))
        self.type_k_box = _choices("Type of the K cache", KV_TYPES)
        self.type_v_box = _choices("Type of the V cache", KV_TYPES)
        self.flash_box = _choices("Flash attention", FLASH_CHOICES)
        self.groups = (
            _group("Context", self.n_ctx_box, self.presets_button),
            _group("KV", self.type_k_box, self.type_v_box),
            _group("Flash attn", self.flash_box),
        )
        self.n_ctx_box.valueChanged.connect(self._on_edited)
        for box in (self.type_k_box, self.type_v_box, self.flash_box):
            box.activated.connect(self._on_edited)
        self.set_settings(self._settings, None)

    @property
    def settings(self) -> ContextSettings:
        return self._settings

    def set_settings(self, settings: ContextSettings, n_ctx_train: int | None) -> None:
        """Show `settings`; `n_ctx_train` is the length the model was trained for, None when unknown."""
        self._settings = settings
        self.n_ctx_box.blockSignals(True)
        self.n_ctx_box.setValue(settings.n_ctx)
        self.n_ctx_box.blockSignals(False)
        self.type_k_box.setCurrentText(settings.type_k)
        self.type_v_box.setCurrentText(settings.type_v)
        self.flash_box.setCurrentText(settings.flash_attn)
        if n_ctx_train != self._n_ctx_train or not self.presets_button.menu().actions():
            self._n_ctx_train = n_ctx_train
            self._fill_presets()
        self._show_hint()

    def _on_edited(self) -> None:
        settings = msgspec.structs.replace(
            self._settings,
            n_ctx=self.n_ctx_box.value(),
            type_k=cast(KvType, self.type_k_box.currentText()),
            type_v=cast(KvType, self.type_v_box.currentText()),
            flash_attn=cast(FlashAttention, self.flash_box.currentText()),
        )
        if settings == self._settings:
            return
        self._settings = settings
        self._show_hint()
        self.context_changed.emit(settings)

    def _fill_presets(self) -> None:
        menu = self.presets_button.menu()
        menu.clear()
        trained = self._n_ctx_train
        for preset in PRESETS:
            if trained is None or preset < trained:
                self._add_preset(menu, preset, "")
        if trained is not None:
            self._add_preset(menu, trained, "  (trained for)")

    def _add_preset(self, menu: QMenu, n_ctx: int, suffix: str) -> None:
        action = menu.addAction(format_count(n_ctx) + suffix)
        action.triggered.connect(lambda _checked=False, chosen=n_ctx: self.n_ctx_box.setValue(chosen))

    def _show_hint(self) -> None:
        trained = self._n_ctx_train
        if trained is None:
            hint = "Context length in tokens"
        elif self._settings.n_ctx > trained:
            hint = f"Longer than the {format_count(trained)} tokens that the model was trained for: answers may degrade"
        else:
            hint = f"Context length in tokens, trained for {format_count(trained)}"
        self.n_ctx_box.setToolTip(hint)


def _choices(name: str, values: tuple[str, ...]) -> QComboBox:
    box = QComboBox()
    box.addItems(list(values))
    box.setAccessibleName(name)
    box.setToolTip(name)
    return box


def _group(label: str, *widgets: QWidget) -> QWidget:
    group = QWidget()
    row = QHBoxLayout(group)
    row.setContentsMargins(0, 0, 0, 0)
    row.setSpacing(4)
    row.addWidget(plain_label(label, "dim"))
    for widget in widgets:
        widget.setFixedHeight(CONTROL_HEIGHT_PX)
        row.addWidget(widget)
    return group
