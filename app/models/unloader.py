"""Unloading models: on request, with the lab they are on, and when nothing was asked of them for long enough."""

from __future__ import annotations

from PySide6.QtCore import QObject

from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.notices import Notices
from app.rig.lab import Lab


class Unloader(QObject):
    """Says what was unloaded."""

    def __init__(self, models: OpenModels, lab: Lab, notices: Notices, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._models = models
        self._lab = lab
        self._notices = notices
        models.expired.connect(self._on_expired)

    def unload_current(self) -> None:
        """Free what is loaded of the current model."""
        self.unload(self._models.current)

    def unload(self, model: OpenModel) -> None:
        """Free what is loaded of `model`."""
        if model.loading.unload():
            self._notices.say(f"Unloaded {model.name}")

    def unload_named(self, name: str) -> None:
        """Free what is loaded of another model than the current one."""
        other = next(
            (each for each in self._models.all if each.name == name and each is not self._models.current), None
        )
        if other is None or other.held is None:
            self._notices.say(f"{name} is not loaded any more. Load to try again.", bad=True)
        else:
            self.unload(other)

    def stop_lab(self) -> None:
        """End the lab's workers; models that are on them are unloaded first."""
        for model in self._models.all:
            if model.held is not None and not self._lab.endpoints.isdisjoint(model.held.endpoints):
                model.loading.cancel()
                self.unload(model)
        self._lab.stop()

    def _on_expired(self, model: OpenModel) -> None:
        self._notices.say(f"Unloaded {model.name}: nothing was asked of it for as long as it was to be kept")
