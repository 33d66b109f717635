"""Counts the tokens of a conversation, its unsent question and its attachments while the model is not loaded.

A child process that reads only the vocabulary (`VocabularyCounter`) counts the tokens, a moment after the last change.
It exits by itself when it is not used. Images and sounds are not counted: only a loaded projector knows their length.
"""

from __future__ import annotations

import logging
from pathlib import Path

from PySide6.QtCore import QObject, Signal

from app.background import Background
from app.models.context_counter import CountedChat
from app.models.open_model import OpenModel
from engine.base.errors import EngineError
from engine.base.values import replace
from engine.chat.context import ContextUse, answer_reserve, use_of
from engine.runtime.probing.vocabulary import VocabularyCounter
from engine.runtime.protocol.messages import Counted
from engine.runtime.session.status import Phase
from widgets.common.delayed_call import DelayedCall

DELAY_MS = 400
"""Milliseconds after the last change before tokens are counted, so that typing starts no count for each letter."""

_log = logging.getLogger("layerdeck.tokens")


class UnloadedCounter(QObject):
    """Counts tokens for one open model while it is not loaded. A newer request cancels the previous one."""

    counted = Signal(ContextUse)

    def __init__(
        self, model: OpenModel, vocabulary: VocabularyCounter, background: Background, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._model, self._vocabulary = model, vocabulary
        self._latest = background.latest()
        self._wanted: CountedChat | None = None
        self._refused: Path | None = None
        """The model file whose vocabulary could not be read, or None. It is not tried again before `forget`."""
        self._timer = DelayedCall(self, self._run, DELAY_MS)

    @property
    def is_wanted(self) -> bool:
        """Whether the model is open but not loaded, so that no model child (the process that loads it) can count."""
        return self._model.file is not None and self._model.loading.phase is Phase.STOPPED

    def count(self, chat: CountedChat) -> None:
        """Count the tokens of a conversation, `DELAY_MS` after the last call.

        `counted` is emitted with the result, unless another count is requested before that.
        """
        self._wanted = chat
        self._timer.start()

    def forget(self) -> None:
        """Cancel the running count. Called if the loaded model counts instead, or if there is nothing to count."""
        self._wanted = self._refused = None
        self._timer.stop()
        self._latest.cancel()

    def _run(self) -> None:
        chat, file, n_ctx = self._wanted, self._model.file, self._model.planned_context
        if chat is None or file is None or n_ctx is None or not self.is_wanted or file.paths[0] == self._refused:
            return
        path = file.paths[0]
        # The vocabulary alone gives no length of images and sounds. The result says how many are not counted.
        n_media = sum(len(each.media) for each in chat.messages)
        messages = tuple(replace(each, media=()) for each in chat.messages)
        request = replace(chat.request, messages=messages, texts=chat.texts)

        def take(counted: Counted) -> None:
            tokens = dict(zip(request.texts, counted.texts, strict=True))
            files = sum(tokens[text] for text in chat.files if text)
            # If a load has begun meanwhile, the child of the loaded model counts.
            if self.is_wanted:
                reserve = answer_reserve(n_ctx, chat.max_tokens)
                use = use_of(counted.prompt, tokens.get(chat.system, 0), files, reserve, n_ctx)
                self.counted.emit(replace(use, uncounted_media=n_media))

        def refuse(error: EngineError) -> None:
            self._refused = path
            _log.info("tokens of %s cannot be counted: %s", path.name, error.summary())

        count = self._vocabulary.count
        self._latest.run("Counting tokens", lambda _task: count(path, request), take, refuse, quiet=True)
