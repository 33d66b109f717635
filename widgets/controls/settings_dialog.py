"""All settings of the next load: what may be chosen, and what is used where the choice is left open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import msgspec
from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QStandardItemModel
from PySide6.QtWidgets import QComboBox, QDialog, QGridLayout, QSpinBox, QToolButton, QVBoxLayout, QWidget

from engine.fit.decisions.decision import Decision
from engine.layout.context_settings import (
    AUTO,
    AUTO_CONTEXT,
    FLASH_ATTENTION_MODES,
    KV_TYPES,
    LOAD_MODES,
    ContextSettings,
    FlashAttention,
    KvType,
    LoadMode,
    OpOffload,
)
from widgets.common.roles import plain_label
from widgets.common.tool_tips import plain_tool_tip
from widgets.controls.decided_row import DecidedRows, choice_box, number_or_auto
from widgets.controls.side_file_form import SideFileForm
from widgets.controls.states import SideFileNames
from widgets.controls.token_spin_box import TokenSpinBox

MOST_THREADS = 512
MOST_BATCH = 1 << 20
WIDTH_PX = 860
OFFLOAD_CHOICES: Mapping[str, OpOffload] = {"auto": AUTO, "on": True, "off": False}


class SettingsDialog(QDialog):
    """Stays open beside the window; every change counts at once, and can be undone there."""

    context_changed = Signal(ContextSettings)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle("Settings of the next load")
        self._settings = ContextSettings()
        self._shown: dict[QSpinBox, int] = {}
        self.auto_ctx_button = QToolButton()
        self.auto_ctx_button.setText("Auto")
        self.auto_ctx_button.setCheckable(True)
        self.auto_ctx_button.setProperty("role", "segment")
        self.auto_ctx_button.setToolTip("As long as is sensible on these devices and fits")
        self.n_ctx_box = TokenSpinBox()
        self.type_k_box = choice_box("Type of the K cache", KV_TYPES)
        self.type_v_box = choice_box("Type of the V cache", KV_TYPES)
        self.flash_box = choice_box("Flash attention", FLASH_ATTENTION_MODES)
        self.load_mode_box = choice_box("How the file is read", LOAD_MODES)
        self.threads_box = number_or_auto("Threads for answers", MOST_THREADS)
        self.threads_batch_box = number_or_auto("Threads for prompts", MOST_THREADS)
        self.offload_box = choice_box(
            "Op offload: devices compute large batches with the CPU's weights", tuple(OFFLOAD_CHOICES)
        )
        self.min_batch_box = number_or_auto("Op offload from this many tokens on", MOST_BATCH)
        self.side_files = SideFileForm()
        self.loaded_label = plain_label("", "dim", wrap=True)
        self.rows = self._lay_out()
        self._connect()
        self.set_settings(self._settings)
        self.set_loaded("")

    def _lay_out(self) -> DecidedRows:
        grid = QGridLayout()
        rows = DecidedRows(grid)
        rows.add_title("Context")
        rows.add("n_ctx", "Length in tokens", self.auto_ctx_button, self.n_ctx_box)
        rows.add("type_k", "K cache", self.type_k_box)
        rows.add("type_v", "V cache", self.type_v_box)
        rows.add("flash_attn", "Flash attention", self.flash_box)
        rows.add_title("Computing")
        rows.add("load_mode", "Read the file", self.load_mode_box)
        rows.add("threads", "Threads for answers", self.threads_box)
        rows.add("threads_batch", "Threads for prompts", self.threads_batch_box)
        rows.add("op_offload", "Op offload", self.offload_box)
        rows.add("op_offload_min_batch", "Op offload from", self.min_batch_box)
        rows.add_title("Beside the model")
        column = QVBoxLayout(self)
        column.setContentsMargins(16, 16, 16, 16)
        column.setSpacing(8)
        column.addLayout(grid)
        column.addWidget(self.side_files)
        column.addWidget(self.loaded_label)
        column.addStretch(1)
        self.setMinimumWidth(WIDTH_PX)
        return rows

    def _connect(self) -> None:
        self.auto_ctx_button.toggled.connect(self._on_edited)
        for spin in (self.n_ctx_box, self.threads_box, self.threads_batch_box, self.min_batch_box):
            spin.valueChanged.connect(self._on_edited)
        for box in (self.type_k_box, self.type_v_box, self.flash_box, self.load_mode_box, self.offload_box):
            box.activated.connect(self._on_edited)

    def set_settings(
        self,
        settings: ContextSettings,
        decisions: tuple[Decision, ...] = (),
        refused: Mapping[str, Mapping[KvType, str]] | None = None,
    ) -> None:
        """Show `settings` with what was decided; `refused` are cache types by setting, with the reason."""
        self._settings = settings
        decided = {each.setting: each for each in decisions}
        self._show_numbers(settings, decided.get("n_ctx"))
        self.type_k_box.setCurrentText(settings.type_k)
        self.type_v_box.setCurrentText(settings.type_v)
        self.flash_box.setCurrentText(settings.flash_attn)
        self.load_mode_box.setCurrentText(settings.load_mode)
        offload = next(text for text, value in OFFLOAD_CHOICES.items() if value == settings.op_offload)
        self.offload_box.setCurrentText(offload)
        for setting, box in (("type_k", self.type_k_box), ("type_v", self.type_v_box)):
            _disable(box, (refused or {}).get(setting, {}))
        self.rows.show_decisions(decided)

    def _show_numbers(self, settings: ContextSettings, n_ctx: Decision | None) -> None:
        is_auto = settings.n_ctx == AUTO_CONTEXT
        used = n_ctx.value if n_ctx is not None and isinstance(n_ctx.value, int) else settings.n_ctx
        for control, value in (
            (self.n_ctx_box, used if is_auto else settings.n_ctx),
            (self.threads_box, settings.threads or 0),
            (self.threads_batch_box, settings.threads_batch or 0),
            (self.min_batch_box, settings.op_offload_min_batch or 0),
        ):
            blocked = control.blockSignals(True)
            control.setValue(value)
            control.blockSignals(blocked)
            self._shown[control] = control.value()
        blocked = self.auto_ctx_button.blockSignals(True)
        self.auto_ctx_button.setChecked(is_auto)
        self.auto_ctx_button.blockSignals(blocked)
        self.n_ctx_box.setEnabled(not is_auto)

    def set_side_files(
        self, names: SideFileNames, devices: tuple[str, ...], decisions: tuple[Decision, ...] = ()
    ) -> None:
        """Show what is loaded beside the model; `devices` are the ids that a projector may go to."""
        self.side_files.set_names(names, devices, {each.setting: each for each in decisions})

    def set_loaded(self, text: str) -> None:
        """Show in a line what is loaded now was loaded with; empty where nothing is."""
        self.loaded_label.setText(text)
        self.loaded_label.setVisible(bool(text))

    def _on_edited(self) -> None:
        before = self._settings
        settings = msgspec.structs.replace(
            before,
            n_ctx=self._n_ctx(before),
            type_k=cast(KvType, self.type_k_box.currentText()),
            type_v=cast(KvType, self.type_v_box.currentText()),
            flash_attn=cast(FlashAttention, self.flash_box.currentText()),
            load_mode=cast(LoadMode, self.load_mode_box.currentText()),
            threads=self._entered(self.threads_box, before.threads) or None,
            threads_batch=self._entered(self.threads_batch_box, before.threads_batch) or None,
            op_offload=OFFLOAD_CHOICES[self.offload_box.currentText()],
            op_offload_min_batch=self._entered(self.min_batch_box, before.op_offload_min_batch) or None,
        )
        if settings != self._settings:
            self._settings = settings
            self._shown = {box: box.value() for box in self._shown}
            self.context_changed.emit(settings)

    def _n_ctx(self, before: ContextSettings) -> int:
        if self.auto_ctx_button.isChecked():
            return AUTO_CONTEXT
        # A length that is no longer left open begins with what is shown.
        return self._entered(self.n_ctx_box, before.n_ctx) or self.n_ctx_box.value()

    def _entered(self, box: QSpinBox, asked: int | None) -> int | None:
        """Return what `box` says, or what was asked for where nobody entered anything: its range may be narrower."""
        return asked if box.value() == self._shown[box] else box.value()


def _disable(box: QComboBox, refused: Mapping[KvType, str]) -> None:
    """Grey out choices that cannot be had, with the reason as their tool tip; the one that is set stays."""
    model = cast(QStandardItemModel, box.model())
    for index in range(box.count()):
        reason = refused.get(cast(KvType, box.itemText(index)))
        item = model.item(index)
        item.setEnabled(reason is None or index == box.currentIndex())
        item.setData(plain_tool_tip(reason or ""), Qt.ItemDataRole.ToolTipRole)
