"""All settings of the next load: what may be chosen, and what is used where the choice is left open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QDialog, QFrame, QGridLayout, QScrollArea, QVBoxLayout, QWidget

from engine.language import tr
from engine.plan.decisions.decision import Decision
from engine.settings.context_settings import ContextSettings, KvType
from engine.settings.table import GROUPS, SETTINGS, Group
from widgets.common.roles import plain_label
from widgets.controls.decided_row import DecidedRows
from widgets.controls.setting_controls import SettingControl, make_control
from widgets.controls.side_file_form import SideFileForm
from widgets.controls.states import SideFileNames

WIDTH_PX = 880
HEIGHT_PX = 720
NO_REFUSALS: Mapping[str, Mapping[KvType, str]] = {}

_TITLES: dict[Group, str] = {"Context": tr("Context"), "Batches": tr("Batches"), "Computing": tr("Computing")}


class SettingsDialog(QDialog):
    """A row for each setting of the table. Stays open beside the window; every change counts at once, and can be undone
    there."""

    context_changed = Signal(ContextSettings)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("Settings of the next load"))
        self._settings = ContextSettings()
        self._decided: Mapping[str, Decision] = {}
        self.controls: dict[str, SettingControl] = {setting.key: make_control(setting) for setting in SETTINGS}
        self.side_files = SideFileForm()
        self.loaded_label = plain_label("", "dim", wrap=True)
        self.rows = self._lay_out()
        for control in self.controls.values():
            control.edited.connect(self._on_edited)
        self.set_settings(self._settings)
        self.set_loaded("")

    def _lay_out(self) -> DecidedRows:
        page = QWidget()
        column = QVBoxLayout(page)
        column.setContentsMargins(16, 16, 16, 16)
        column.setSpacing(8)
        grid = QGridLayout()
        rows = DecidedRows(grid)
        for group in GROUPS:
            rows.add_title(_TITLES[group])
            for setting in SETTINGS:
                if setting.group == group:
                    rows.add(setting.key, setting.label, *self.controls[setting.key].widgets, hint=setting.help)
        rows.add_title(tr("Beside the model"))
        column.addLayout(grid)
        column.addWidget(self.side_files)
        column.addWidget(self.loaded_label)
        column.addStretch(1)
        area = QScrollArea()
        area.setAccessibleName(tr("All settings"))
        area.setWidgetResizable(True)
        area.setFrameShape(QFrame.Shape.NoFrame)
        area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        area.setWidget(page)
        outer = QVBoxLayout(self)
        outer.setContentsMargins(0, 0, 0, 0)
        outer.addWidget(area)
        self.setMinimumWidth(WIDTH_PX)
        self.resize(WIDTH_PX, HEIGHT_PX)
        return rows

    def set_settings(
        self,
        settings: ContextSettings,
        decisions: tuple[Decision, ...] = (),
        refused: Mapping[str, Mapping[KvType, str]] = NO_REFUSALS,
    ) -> None:
        """Show `settings` with what was decided; `refused` are cache types by setting, with the reason."""
        self._decided = {each.setting: each for each in decisions}
        self._show(settings)
        for key, control in self.controls.items():
            control.disable_choices({str(word): reason for word, reason in refused.get(key, {}).items()})
        self.rows.show_decisions(self._decided)

    def _show(self, settings: ContextSettings) -> None:
        self._settings = settings
        for key, control in self.controls.items():
            control.show_value(getattr(settings, key), self._decided.get(key))

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
        entered: dict[str, Any] = {key: control.value() for key, control in self.controls.items()}
        settings = msgspec.structs.replace(self._settings, **entered)
        if settings.n_seq_max != self._settings.n_seq_max and settings.n_ctx == self._settings.n_ctx:
            settings = self._settings.with_requests(settings.n_seq_max)
        if settings != self._settings:
            self._show(settings)
            self.context_changed.emit(settings)
