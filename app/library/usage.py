"""What use shows of models: when one was opened last, and how fast it answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import msgspec

from app.library.shown import ShownLibrary
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from engine.errors import EngineError
from engine.gguf.model_file import ModelFile
from engine.language import tr
from engine.library.notes import Notes
from engine.session.events import Done

LEAST_TOKENS = 16
"""An answer shorter than this says little about speed."""
_log = logging.getLogger("layerdeck.library")


class UsageNotes:
    """Notes what is noticed; what cannot be kept is no trouble of anybody's."""

    def __init__(self, shown: ShownLibrary, models: OpenModels) -> None:
        self._shown, self._models = shown, models

    def note_opened(self, file: ModelFile | None) -> None:
        """Note that the model on the table was opened just now; a new conversation begins with its preset."""
        if file is None:
            return
        model, path, now = self._models.current, file.paths[0].absolute(), time.time()
        noted: list[Notes] = []
        stock = self._shown.stock

        def begin() -> None:
            if noted and model.file is file:
                _begin_with(model, noted[0].preset)

        self._shown.change(tr("Noting a use"), lambda: noted.append(stock.note_opened(path, now)), _log_error, begin)

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
        self._shown.change(tr("Noting a speed"), lambda: stock.note_use(path, change), _log_error)


def _begin_with(model: OpenModel, preset: str) -> None:
    """Have a conversation that was not begun yet begin with a preset, unless one was chosen for it."""
    conversation = model.conversation
    is_known = not conversation.presets or preset in conversation.presets
    if preset and is_known and conversation.is_empty and not conversation.chat.preset:
        conversation.change_chat(msgspec.structs.replace(conversation.chat, preset=preset))


def _log_error(error: EngineError) -> None:
    _log.info("library: %s", error.summary())
