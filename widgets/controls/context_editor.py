"""Context length, KV cache types and flash attention of the next load, with what is left open and was decided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import msgspec
from PySide6.QtCore import QObject, Signal
from PySide6.QtWidgets import QComboBox, QHBoxLayout, QLabel, QMenu, QToolButton, QWidget

from engine.base.language import tr
from engine.planning.plan.decisions.decision import Decision
from engine.planning.settings.context_settings import (
    AUTO_CONTEXT,
    FLASH_ATTENTION_MODES,
    KV_TYPES,
    ContextSettings,
    FlashAttention,
    KvType,
)
from widgets.common.counts import format_count
from widgets.common.roles import plain_label, tool_button
from widgets.common.tool_tips import plain_tool_tip
from widgets.controls.decided import decided_text
from widgets.controls.setting_controls import TokenSpinBox, is_typed_in, show_number
from widgets.controls.values import CONTROL_HEIGHT_PX

PRESETS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
AUTO_PRESET = tr("Auto: as long as is sensible and fits")


class ContextEditor(QObject):
    """Edits the parts of `ContextSettings` that the bar shows; the rest passes through unchanged.

    `groups` are the widgets to lay out.
    """

    context_changed = Signal(ContextSettings)
    all_requested = Signal()

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._settings = ContextSettings()
        self._decisions: Mapping[str, Decision] = {}
        self._n_ctx_train: int | None = None
        self._shown_n_ctx = 0
        self.n_ctx_box = TokenSpinBox()
        self.n_ctx_box.setAccessibleName(tr("Context length in tokens"))
        self.presets_button = tool_button("▾", tr("Context length presets"), "compact")
        self.presets_button.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
        self.presets_button.setMenu(QMenu(self.presets_button))
        self.type_k_box = _choices(tr("Type of the K cache"), KV_TYPES)
        self.type_v_box = _choices(tr("Type of the V cache"), KV_TYPES)
        self.flash_box = _choices(tr("Flash attention"), FLASH_ATTENTION_MODES)
        self.all_button = tool_button("⋯", tr("All settings of the next load"), "compact")
        self.all_button.setToolTip(tr("All settings of the next load, and what was decided"))
        self.context_label = plain_label(tr("Context"), "dim")
        self.groups = (
            _group(self.context_label, self.n_ctx_box, self.presets_button),
            _group(plain_label("KV", "dim"), self.type_k_box, self.type_v_box),
            _group(plain_label(tr("Flash attn"), "dim"), self.flash_box, self.all_button),
        )
        self.n_ctx_box.valueChanged.connect(self._on_edited)
        for box in (self.type_k_box, self.type_v_box, self.flash_box):
            box.activated.connect(self._on_edited)
        self.all_button.clicked.connect(self.all_requested)
        self.set_settings(self._settings, None)

    @property
    def settings(self) -> ContextSettings:
        return self._settings

    def set_settings(
        self, settings: ContextSettings, n_ctx_train: int | None, decisions: tuple[Decision, ...] = ()
    ) -> None:
        """Show `settings` and what was decided; `n_ctx_train`: the length trained for, None when unknown."""
        # Free memory moves all the time, and with it a length left open: not under somebody's fingers.
        keeps_typed = settings == self._settings and is_typed_in(self.n_ctx_box)
        self._settings = settings
        self._decisions = {each.setting: each for each in decisions}
        n_ctx = self.n_ctx_box.value() if keeps_typed else self._used_n_ctx()
        self._shown_n_ctx = show_number(self.n_ctx_box, n_ctx)
        self.context_label.setText(self._label())
        self.type_k_box.setCurrentText(settings.type_k)
        self.type_v_box.setCurrentText(settings.type_v)
        self.flash_box.setCurrentText(settings.flash_attn)
        if n_ctx_train != self._n_ctx_train or not self.presets_button.menu().actions():
            self._n_ctx_train = n_ctx_train
            self._fill_presets()
        self._show_hints()

    def _label(self) -> str:
        """Name the box; with several requests at a time it says how many have that context each."""
        count = self._settings.n_seq_max
        name = (
            tr("Context")
            if count == 1 or self._settings.kv_unified
            else tr("Context, {count} ×", count=format_count(count))
        )
        return tr("{name} · auto", name=name) if self._settings.n_ctx == AUTO_CONTEXT else name

    def _used_n_ctx(self) -> int:
        """Return what one request has."""
        if self._settings.n_ctx != AUTO_CONTEXT:
            return self._settings.n_ctx_each
        decided = self._decisions.get("n_ctx")
        if decided is None or not isinstance(decided.value, int):
            return self.n_ctx_box.value()
        return msgspec.structs.replace(self._settings, n_ctx=decided.value).n_ctx_each

    def _on_edited(self) -> None:
        # The box may show another number than was asked for: a length left open, or one below its range.
        entered = self.n_ctx_box.value()
        asked = self._settings if entered == self._shown_n_ctx else self._settings.with_each(entered)
        self._change(
            msgspec.structs.replace(
                asked,
                type_k=cast(KvType, self.type_k_box.currentText()),
                type_v=cast(KvType, self.type_v_box.currentText()),
                flash_attn=cast(FlashAttention, self.flash_box.currentText()),
            )
        )

    def _change(self, settings: ContextSettings) -> None:
        if settings == self._settings:
            return
        self._settings = settings
        self._shown_n_ctx = self.n_ctx_box.value()
        self._show_hints()
        self.context_changed.emit(settings)

    def _fill_presets(self) -> None:
        menu = self.presets_button.menu()
        menu.clear()
        action = menu.addAction(AUTO_PRESET)
        action.triggered.connect(lambda: self._change(msgspec.structs.replace(self._settings, n_ctx=AUTO_CONTEXT)))
        menu.addSeparator()
        trained = self._n_ctx_train
        for preset in PRESETS:
            if trained is None or preset < trained:
                self._add_preset(menu, preset, "")
        if trained is not None:
            self._add_preset(menu, trained, tr("  (trained for)"))

    def _add_preset(self, menu: QMenu, n_ctx: int, suffix: str) -> None:
        def choose() -> None:
            # The box may show just this number already, where the length was left open.
            self._change(self._settings.with_each(n_ctx))
            self.n_ctx_box.setValue(n_ctx)

        menu.addAction(format_count(n_ctx) + suffix).triggered.connect(choose)

    def _show_hints(self) -> None:
        trained, settings = self._n_ctx_train, self._settings
        if trained is None:
            hint = tr("Context length in tokens")
        elif settings.n_ctx_each > trained:
            hint = tr(
                "Longer than the {trained} tokens that the model was trained for: answers may degrade",
                trained=format_count(trained),
            )
        else:
            hint = tr("Context length in tokens, trained for {trained}", trained=format_count(trained))
        if settings.n_seq_max > 1 and settings.n_ctx != AUTO_CONTEXT and not settings.kv_unified:
            hint += tr(
                "\nFor each of {n_seq_max} requests at a time: {n_ctx} in all",
                n_seq_max=settings.n_seq_max,
                n_ctx=format_count(settings.n_ctx),
            )
        self._tell(self.n_ctx_box, "n_ctx", hint)
        for box, setting in (
            (self.type_k_box, "type_k"),
            (self.type_v_box, "type_v"),
            (self.flash_box, "flash_attn"),
        ):
            self._tell(box, setting, box.accessibleName())

    def _tell(self, widget: QWidget, setting: str, hint: str) -> None:
        decided = self._decisions.get(setting)
        widget.setToolTip(plain_tool_tip(hint if decided is None else f"{hint}\n{decided_text(decided)}"))


def _choices(name: str, values: tuple[str, ...]) -> QComboBox:
    box = QComboBox()
    box.addItems(list(values))
    box.setAccessibleName(name)
    box.setToolTip(name)
    return box


def _group(label: QLabel, *widgets: QWidget) -> QWidget:
    group = QWidget()
    row = QHBoxLayout(group)
    row.setContentsMargins(0, 0, 0, 0)
    row.setSpacing(4)
    row.addWidget(label)
    for widget in widgets:
        widget.setFixedHeight(CONTROL_HEIGHT_PX)
        row.addWidget(widget)
    return group
