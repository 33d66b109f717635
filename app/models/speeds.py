"""Keeps how fast devices and layouts are: measured on request, and learnt from every answer."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from PySide6.QtCore import QObject, Signal

from app.background import Background
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.notices import Notices
from app.paths import speeds_path
from app.rig.live_rig import LiveRig
from engine.devices.device import Rig
from engine.errors import EngineError
from engine.fit.speed_book import SpeedBook, read_speed_book, write_speed_book
from engine.fit.strategies.speeds import Speeds, layout_class
from engine.memory.model_memory import ModelMemory
from engine.rigs.speed_test import known_speeds, measured_book, speed_lines
from engine.session.events import Done

_log = logging.getLogger("layerdeck.speeds")


class SpeedKeeper(QObject):
    """One book for all models. What is kept is written beside the GUI thread."""

    compared = Signal()
    """An answer was set against what was predicted of it."""

    def __init__(
        self,
        live: LiveRig,
        models: OpenModels,
        background: Background,
        notices: Notices,
        path: Path | None = None,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._live = live
        self._models = models
        self._background = background
        self._notices = notices
        self._path = path or speeds_path()
        self.book = read_speed_book(self._path)

    def follow(self, model: OpenModel) -> None:
        """Learn from the answers of `model`."""
        model.conversation.answer_finished.connect(lambda event: self._on_answer(model, event))

    def known_speeds(self, rig: Rig) -> Speeds:
        """Return what is known of the devices of `rig`. Asks drivers: not for the GUI thread."""
        return known_speeds(rig, self.book)

    def measure(self) -> None:
        """Measure the devices of the rig, and say what they reach."""
        rig, book = self._live.rig, self.book
        held = [endpoint for model in self._models.held for endpoint in model.endpoints]

        def show(measured: tuple[SpeedBook, tuple[str, ...]]) -> None:
            # Answers may have been learnt from meanwhile.
            book, problems = replace(measured[0], ratios=self.book.ratios), measured[1]
            self._keep(book)
            self._notices.say(" ".join((*speed_lines(rig, book), *problems)))

        self._background.run("Measuring speeds", lambda: measured_book(rig, book, held), show, self._notices.tell)

    def learn(self, book: SpeedBook) -> None:
        """Take what was measured elsewhere; answers may have been learnt from meanwhile."""
        self._keep(replace(book, ratios=self.book.ratios))

    def _on_answer(self, model: OpenModel, event: Done) -> None:
        file, loaded, rig = model.file, model.loading.loaded, self._live.rig
        if file is None or loaded is None:
            return
        used = {*loaded.edit.layout.devices, *(override.device for override in loaded.edit.layout.overrides)}
        if not used <= set(rig.ids):
            return  # The devices are not those of the load any more.

        def predict() -> float:
            from engine.fit.strategies.fastest import predict_layout

            # Without what was learnt: how far the bare prediction is off is what is to be learnt.
            speeds = replace(self.known_speeds(rig), ratios={})
            return predict_layout(ModelMemory(file), rig, loaded.edit.layout, loaded.edit.context, speeds).middle_s

        def learn(predicted_s: float) -> None:
            name = layout_class(loaded.edit.layout, rig)
            rate = event.generation_tokens_per_second
            self._keep(self.book.with_answer(name, predicted_s, event.generated_tokens, rate))
            self.compared.emit()

        self._background.run("Comparing speeds", predict, learn, _log_error, quiet=True)

    def _keep(self, book: SpeedBook) -> None:
        if book == self.book:
            return
        self.book = book
        path = self._path
        self._background.run("Keeping speeds", lambda: write_speed_book(path, book), _nothing, _log_error, quiet=True)


def _log_error(error: EngineError) -> None:
    _log.info("speeds: %s", error.summary())


def _nothing(_result: None) -> None:
    """The file is written; nobody need be told."""
