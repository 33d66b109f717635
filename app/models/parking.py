"""Parked models: unloaded to give their memory back, and loaded again by the next question, even after a restart."""

from __future__ import annotations

from functools import partial

from PySide6.QtCore import QObject

from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.models.opener import ModelOpener
from app.settings import Settings


class ParkedModels(QObject):
    """Stores in the settings which models are parked, and marks a model as parked when it is opened again."""

    def __init__(
        self, models: OpenModels, opener: ModelOpener, settings: Settings, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._models, self._settings = models, settings
        for model in models.all:
            self._follow(model)
        models.added.connect(self._follow)
        opener.model_changed.connect(self._on_model_changed)

    def _follow(self, model: OpenModel) -> None:
        model.parked_changed.connect(partial(self._on_parked, model))

    def _on_parked(self, model: OpenModel, parked: bool) -> None:
        # Another file that takes the place of a parked model must not change what is stored of it.
        if model.file is not None and (parked or model.held is not None):
            self._settings.keep_parked(model.file.paths[0], parked=parked)

    def _on_model_changed(self) -> None:
        model = self._models.current
        if model.file is not None and model.held is None and model.file.paths[0] in self._settings.parked_models:
            model.set_parked(True)
