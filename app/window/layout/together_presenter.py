"""The presenter of Layout > Plan Several Models: layouts for models that are loaded at the same time."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtWidgets import QWidget

from app.library.library import Library
from app.load.several import SeveralModels, SeveralPlanned
from app.models.open_models import OpenModels
from app.settings import Settings
from app.window.dialogs import OneDialog
from engine.base.language import tr
from engine.base.units import format_bytes
from widgets.library.together_dialog import ModelToChoose, TogetherDialog


class TogetherPresenter(OneDialog[TogetherDialog]):
    """Fills the dialog that plans several models at the same time, and loads them with the layouts found.

    It offers open models, recent models and models of the library.
    """

    def __init__(
        self, several: SeveralModels, models: OpenModels, library: Library, settings: Settings, window: QWidget
    ) -> None:
        super().__init__(self._make_dialog, self._begin, window)
        self._several, self._models, self._library, self._settings = several, models, library, settings
        self._window = window
        self._planned: SeveralPlanned | None = None
        several.planned.connect(self._on_planned)
        several.refused.connect(self._on_refused)

    def _make_dialog(self) -> TogetherDialog:
        dialog = TogetherDialog(self._offered(), self._window)
        dialog.chosen_changed.connect(self._on_chosen)
        dialog.load_requested.connect(self._on_load)
        dialog.finished.connect(lambda _result: self._several.cancel())
        return dialog

    def _offered(self) -> list[ModelToChoose]:
        """Return open models, then recent models, then models of the library; each file once."""
        known = [(model.file.name, model.file.paths[0]) for model in self._models.all if model.file is not None]
        known += [(recent.title, recent.path) for recent in self._settings.recent_models]
        for listed in self._library.contents.models:
            known += [(listed.entry.title, copy.path) for copy in listed.chosen.copies[:1]]
        by_path: dict[Path, str] = {}
        for title, path in known:
            by_path.setdefault(path, title)
        titles = list(by_path.values())
        return [
            ModelToChoose(title if titles.count(title) == 1 else f"{title} ({path.name})", path)
            for path, title in by_path.items()
        ]

    def _begin(self, dialog: TogetherDialog) -> None:
        loaded = [model.file.paths[0] for model in self._models.all if model.file is not None and model.held]
        current = self._models.current.file
        dialog.choose(tuple(dict.fromkeys([*loaded, *([] if current is None else [current.paths[0]])])))

    def _on_chosen(self, paths: tuple[Path, ...]) -> None:
        self._planned = None
        if self.dialog is None:
            return
        if not paths:
            self._several.cancel()
            self.dialog.show_status(tr("Add models to see whether they fit at the same time."))
            return
        self.dialog.show_status(tr("Computing…"))
        self._several.plan(paths)

    def _on_planned(self, planned: SeveralPlanned) -> None:
        from engine.planning.fit.together import together_sentence

        dialog = self.dialog
        if dialog is None or dialog.chosen != planned.paths:
            return
        self._planned, found = planned, planned.found
        models = [
            (
                each.name,
                ", ".join(f"{run.device} {run.length}" for run in each.plan.edit.layout.runs),
                format_bytes(sum(each.need_bytes.values())),
                planned.speeds[each.name],
            )
            for each in found.placed
        ]
        devices = [
            (device.id, format_bytes(found.need_bytes(device.id)), format_bytes(device.available_bytes))
            for device in found.rig.all_devices
        ]
        dialog.show_plan(models, devices, together_sentence(found), may_load=found.fits)

    def _on_refused(self, sentence: str) -> None:
        if self.dialog is not None:
            self.dialog.show_status(sentence)

    def _on_load(self) -> None:
        if self._planned is not None:
            self._several.load(self._planned)
