"""What use shows of models: when one was opened last, and how fast it answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from app.library.shown import ShownLibrary
from app.models.open_model import OpenModel
from engine.errors import EngineError
from engine.gguf.model_file import ModelFile
from engine.session.events import Done

LEAST_TOKENS = 16
"""An answer shorter than this says little about speed."""
_log = logging.getLogger("layerdeck.library")


class UsageNotes:
    """Notes what is noticed; what cannot be kept is no trouble of anybody's."""

    def __init__(self, shown: ShownLibrary) -> None:
        self._shown = shown

    def note_opened(self, file: ModelFile | None) -> None:
        """Note that a model was opened just now."""
        if file is not None:
            path, now = file.paths[0].absolute(), time.time()
            stock = self._shown.stock
            self._shown.change("Noting a use", lambda: stock.note_opened(path, now), _log_error)

    def follow(self, model: OpenModel) -> None:
        """Note the speed of the answers of `model`."""
        model.conversation.answer_finished.connect(lambda event: self._on_answer(model, event))

    def _on_answer(self, model: OpenModel, event: Done) -> None:
        file, loaded = model.file, model.loading.loaded
        if file is None or loaded is None or event.generated_tokens < LEAST_TOKENS:
            return
        change: Mapping[str, object] = {
            "measured": event.generation_tokens_per_second,
            "measured_on": ", ".join(dict.fromkeys(loaded.edit.layout.devices)),
            "last_used": time.time(),
        }
        path, stock = file.paths[0], self._shown.stock
        self._shown.change("Noting a speed", lambda: stock.note_use(path, change), _log_error)


def _log_error(error: EngineError) -> None:
    _log.info("library: %s", error.summary())
