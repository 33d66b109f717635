"""Carries values between one model's conversation and its chat pane."""

from __future__ import annotations

import logging

from PySide6.QtCore import QObject

from app.models.conversation import ContextUse
from app.models.loading import ModelState
from app.models.open_model import OpenModel
from engine.session.events import Done
from widgets.chat.chat_pane import ChatPane

_log = logging.getLogger("layerdeck.chat")


class ChatPresenter(QObject):
    """Goes on while another model is current: an answer streams into its own pane."""

    def __init__(self, model: OpenModel, pane: ChatPane, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._pane = pane
        loading, conversation = model.loading, model.conversation
        loading.state_changed.connect(self._on_state_changed)
        conversation.answer_started.connect(pane.begin_answer)
        conversation.answer_text.connect(pane.append_text)
        conversation.answer_finished.connect(self._on_answer_finished)
        conversation.answer_failed.connect(pane.fail_answer)
        conversation.context_use_changed.connect(self._on_context_use)
        conversation.cleared.connect(pane.clear)
        loading.lost_changed.connect(pane.set_lost)
        pane.send_requested.connect(conversation.send)
        pane.stop_requested.connect(loading.stop_answer)
        pane.clear_requested.connect(conversation.clear)
        pane.clear_undone.connect(lambda: conversation.restore(pane.messages()))

    def _on_state_changed(self, state: ModelState) -> None:
        if state is ModelState.READY:
            self._pane.set_ready(True)
        elif state is ModelState.LOADING:
            self._pane.set_ready(False, "Loading…")
            self._pane.set_context_full(False)
        elif state is not ModelState.GENERATING:
            self._pane.set_ready(False, "Load a model to chat.")

    def _on_answer_finished(self, event: Done) -> None:
        stats = (
            f"{event.generation_tokens_per_second:.1f} tok/s · prompt {event.prompt_tokens_per_second:.0f} tok/s · "
            f"{event.generated_tokens} tokens"
        )
        if event.stop_reason == "stopped":
            stats = f"{stats} · stopped"
        if event.replaced:
            _log.warning("%s", event.replaced)
            stats = f"{stats}\n{event.replaced}"
        self._pane.finish_answer(stats)
        self._pane.set_context_full(event.stop_reason == "context_full")

    def _on_context_use(self, use: ContextUse) -> None:
        self._pane.set_context(use.used, use.total)
