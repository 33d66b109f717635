"""The editor for context length, KV cache types and flash attention of the next load, with the decided values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from PySide6.QtCore import QObject, Signal
from PySide6.QtWidgets import QComboBox, QLabel, QMenu, QToolButton, QWidget

from engine.base.language import tr
from engine.base.units import format_count
from engine.base.values import replace
from engine.planning.plan.decisions.decision import Decision
from engine.planning.settings.context_settings import (
    AUTO_CONTEXT,
    FLASH_ATTENTION_MODES,
    KV_TYPES,
    ContextSettings,
    FlashAttention,
    KvType,
)
from widgets.common.boxes import h_box
from widgets.common.inputs import ComboBox
from widgets.common.roles import plain_label, plain_tool_tip, tool_button
from widgets.controls.decided import decided_text
from widgets.controls.setting_controls import TokenSpinBox, is_typed_in, show_number
from widgets.controls.values import CONTROL_HEIGHT_PX

# Context lengths in tokens that models are commonly trained for.
PRESETS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
AUTO_PRESET = tr("Auto: a length that suits the devices, or less if memory is short")


class ContextEditor(QObject):
    """Edits the fields of `ContextSettings` that are in the settings bar. Other fields stay as they are.

    The caller lays out the widgets in `groups`. Cache types and flash attention are shown only after "Details":
    people who try a first model need none of them, and the defaults fit.
    """

    context_changed = Signal(ContextSettings)
    all_requested = Signal()
    details_toggled = Signal(bool)

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
        self.all_button.setToolTip(tr("All settings of the next load, with the values in use"))
        self.context_label = plain_label(tr("Context"), "dim")
        self.details_button = tool_button(tr("Details"), tr("Show KV cache types and flash attention"), "segment")
        self.details_button.setCheckable(True)
        self._details = (
            _group(plain_label(tr("KV cache"), "dim"), self.type_k_box, self.type_v_box),
            _group(plain_label(tr("Flash attention"), "dim"), self.flash_box),
        )
        self.groups = (
            _group(self.context_label, self.n_ctx_box, self.presets_button),
            *self._details,
            _group(self.details_button, self.all_button),
        )
        self.show_details(False)
        self.n_ctx_box.valueChanged.connect(self._on_edited)
        # `activated` is emitted only for a choice by the user; `currentIndexChanged` also for `setCurrentText`.
        for box in (self.type_k_box, self.type_v_box, self.flash_box):
            box.activated.connect(self._on_edited)
        self.details_button.clicked.connect(self._on_details)
        self.all_button.clicked.connect(self.all_requested)
        self.set_settings(self._settings, None)

    @property
    def controls(self) -> tuple[QWidget, ...]:
        """All boxes and buttons, from left to right."""
        boxes = (self.type_k_box, self.type_v_box, self.flash_box)
        return (self.n_ctx_box, self.presets_button, *boxes, self.details_button, self.all_button)

    def show_details(self, shown: bool) -> None:
        """Show or hide cache types and flash attention, without emitting a signal."""
        self.details_button.setChecked(shown)
        for group in self._details:
            group.setVisible(shown)

    def _on_details(self, shown: bool) -> None:
        self.show_details(shown)
        self.details_toggled.emit(shown)

    def set_settings(
        self, settings: ContextSettings, n_ctx_train: int | None, decisions: tuple[Decision, ...] = ()
    ) -> None:
        """Show `settings`.

        `n_ctx_train`: the context length that the model was trained for; None if unknown.
        `decisions`: the values that were decided for automatic settings.
        """
        # An automatic length follows free memory, which changes all the time. It must not replace a number being typed.
        keeps_typed = settings == self._settings and is_typed_in(self.n_ctx_box)
        self._settings = settings
        self._decisions = {each.setting: each for each in decisions}
        n_ctx = self.n_ctx_box.value() if keeps_typed else self._used_n_ctx()
        self._shown_n_ctx = show_number(self.n_ctx_box, n_ctx)
        self.context_label.setText(self._label())
        self.type_k_box.setCurrentText(settings.type_k)
        self.type_v_box.setCurrentText(settings.type_v)
        self.flash_box.setCurrentText(settings.flash_attn)
        # Filled only for another model: settings are shown again after every edit, and the menu may be open.
        if n_ctx_train != self._n_ctx_train or not self.presets_button.menu().actions():
            self._n_ctx_train = n_ctx_train
            self._fill_presets()
        self._show_hints()

    def _label(self) -> str:
        """Return the label of the context box. With several parallel requests it includes their number."""
        count = self._settings.n_seq_max
        name = (
            tr("Context")
            if count == 1 or self._settings.kv_unified
            else tr("Context per request (×{count})", count=format_count(count))
        )
        return tr("{name} · auto", name=name) if self._settings.n_ctx == AUTO_CONTEXT else name

    def _used_n_ctx(self) -> int:
        """Return the context length of one request in tokens: the entered value, or the one chosen for "auto"."""
        if self._settings.n_ctx != AUTO_CONTEXT:
            return self._settings.n_ctx_each
        decided = self._decisions.get("n_ctx")
        if decided is None or not isinstance(decided.value, int):
            return self.n_ctx_box.value()
        return replace(self._settings, n_ctx=decided.value).n_ctx_each

    def _on_edited(self) -> None:
        # The box may show another number than was set: an automatic length, or one below its range.
        entered = self.n_ctx_box.value()
        asked = self._settings if entered == self._shown_n_ctx else self._settings.with_each(entered)
        self._change(
            replace(
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
        # `AUTO_CONTEXT` is kept in the settings; the length comes from the decision and follows the free memory.
        action = menu.addAction(AUTO_PRESET)
        action.triggered.connect(lambda: self._change(replace(self._settings, n_ctx=AUTO_CONTEXT)))
        menu.addSeparator()
        trained = self._n_ctx_train
        for preset in PRESETS:
            # A longer context is allowed, but answers may get worse, so it has to be typed.
            if trained is None or preset < trained:
                self._add_preset(menu, preset, "")
        if trained is not None:
            self._add_preset(menu, trained, tr("  (trained length)"))

    def _add_preset(self, menu: QMenu, n_ctx: int, suffix: str) -> None:
        def choose() -> None:
            # Set first: with an automatic length the box may show this number already, and would emit nothing.
            self._change(self._settings.with_each(n_ctx))
            self.n_ctx_box.setValue(n_ctx)

        menu.addAction(format_count(n_ctx) + suffix).triggered.connect(choose)

    def _show_hints(self) -> None:
        trained, settings = self._n_ctx_train, self._settings
        if trained is None:
            hint = tr("Context length in tokens")
        elif settings.n_ctx_each > trained:
            hint = tr(
                "Longer than the trained length of {trained} tokens: answers may get worse",
                trained=format_count(trained),
            )
        else:
            hint = tr("Context length in tokens; the model was trained with {trained}", trained=format_count(trained))
        # Without `kv_unified` llama.cpp divides `n_ctx` by `n_seq_max`; the box shows the part of one request.
        if settings.n_seq_max > 1 and settings.n_ctx != AUTO_CONTEXT and not settings.kv_unified:
            hint += tr(
                "\nFor each of {n_seq_max} parallel requests; {n_ctx} tokens in total",
                n_seq_max=settings.n_seq_max,
                n_ctx=format_count(settings.n_ctx),
            )
        self._set_tooltip(self.n_ctx_box, "n_ctx", hint)
        for box, setting in (
            (self.type_k_box, "type_k"),
            (self.type_v_box, "type_v"),
            (self.flash_box, "flash_attn"),
        ):
            self._set_tooltip(box, setting, box.accessibleName())

    def _set_tooltip(self, widget: QWidget, setting: str, hint: str) -> None:
        decided = self._decisions.get(setting)
        widget.setToolTip(plain_tool_tip(hint if decided is None else f"{hint}\n{decided_text(decided)}"))


def _choices(name: str, values: tuple[str, ...]) -> QComboBox:
    box = ComboBox()
    box.addItems(list(values))
    box.setAccessibleName(name)
    box.setToolTip(name)
    return box


def _group(*widgets: QWidget) -> QWidget:
    group = QWidget()
    row = h_box(group, spacing=4)
    for widget in widgets:
        if not isinstance(widget, QLabel):
            widget.setFixedHeight(CONTROL_HEIGHT_PX)
        row.addWidget(widget)
    return group
