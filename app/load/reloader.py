"""Loads a lost model again by itself, where people chose that: once, until it has answered again."""

from __future__ import annotations

from functools import partial

from PySide6.QtCore import QObject, QTimer

from app.load.loader import Loader
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.settings import Settings


class Reloader(QObject):
    """Follows all open models. A model that is lost again before it has answered stays for people to look at."""

    def __init__(self, models: OpenModels, loader: Loader, settings: Settings, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._loader = loader
        self._settings = settings
        self._tried: set[OpenModel] = set()
        models.added.connect(self._follow)
        for model in models.all:
            self._follow(model)

    def _follow(self, model: OpenModel) -> None:
        model.loading.lost_changed.connect(partial(self._on_lost_changed, model))
        model.loading.answered.connect(lambda _event: self._tried.discard(model))

    def _on_lost_changed(self, model: OpenModel, lost: bool) -> None:
        if lost and self._settings.reload_lost and model not in self._tried:
            self._tried.add(model)
            # Not in the middle of what tells of the loss.
            QTimer.singleShot(0, self, partial(self._loader.reload, model))
