"""Carries values between one model's conversation and its chat pane."""

from __future__ import annotations

import logging

import msgspec
from PySide6.QtCore import QObject, QUrl
from PySide6.QtGui import QDesktopServices

from app.chats.shown_messages import shown_message, shown_messages
from app.models.context_counter import ContextCounter
from app.models.conversation import ContextFill, Restored
from app.models.loading import ModelState
from app.models.open_model import OpenModel
from app.models.reading_pace import ReadingPace, left_words
from engine.chats.answer import Append
from engine.chats.context import ContextUse
from engine.chats.tree import MessageTree
from engine.language import tr
from engine.session.events import Cancelled, Crashed, Done, Failed, OutOfMemory, Reading
from widgets.chat.chat_pane import ChatPane
from widgets.chat.context_meter import ContextPart
from widgets.chat.shown import MessageAction
from widgets.common.counts import format_count

_log = logging.getLogger("layerdeck.chat")


class ChatPresenter(QObject):
    """Goes on while another model is current: an answer streams into its own pane."""

    def __init__(self, model: OpenModel, pane: ChatPane, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._model = model
        self._pane = pane
        self._shown_chat = ""
        self._read: int | None = None
        """The request whose prompt was read and is in the meter."""
        self._pace = ReadingPace()
        self._logged = ""
        """What the log was told last of a chat template that is not used."""
        self._before_delete: MessageTree | None = None
        """What a deletion can be taken back to, while nothing else became of the messages."""
        self._after_delete = MessageTree()
        loading, conversation = model.loading, model.conversation
        self._conversation = conversation
        loading.state_changed.connect(self._on_state_changed)
        loading.bridge.reading.connect(self._on_reading)
        loading.ended.connect(self._on_ended)
        loading.lost_changed.connect(pane.set_lost)
        conversation.shown_changed.connect(self._show_messages)
        conversation.chat_changed.connect(self._show_chat)
        conversation.message_changed.connect(self._show_message)
        conversation.piece_kept.connect(self._on_piece)
        conversation.answer_finished.connect(self._on_answer_finished)
        conversation.context_use_changed.connect(self._on_context_use)
        conversation.restored.connect(self._on_restored)
        self._counter = ContextCounter(loading, self)
        self._counter.counted.connect(self._on_counted)
        conversation.overflow_asked.connect(pane.overflow_banner.ask)
        pane.overflow_banner.answered.connect(conversation.answering.answer_overflow)
        pane.stop_requested.connect(conversation.answering.stop)
        pane.draft_changed.connect(self._on_draft)
        pane.acted.connect(self._on_action)
        pane.undo_requested.connect(self._on_undo)
        pane.link_opened.connect(lambda address: QDesktopServices.openUrl(QUrl(address)))
        self._show_chat()
        self._show_messages()

    # ------------------------------------------------------------------ to the pane

    def _show_chat(self) -> None:
        chat = self._conversation.chat
        self._pane.show_title(chat.title)
        if chat.id != self._shown_chat:
            self._shown_chat = chat.id
            self._forget_deletion()
            self._pane.set_context_full(False)
            self._pane.show_remark("")  # it was about the one before
            self._pane.show_draft(chat.draft)

    def _show_messages(self) -> None:
        conversation = self._conversation
        if self._before_delete is not None and conversation.tree.messages != self._after_delete.messages:
            self._forget_deletion()
        self._pane.set_answering(conversation.is_answering)
        self._pane.show_messages(shown_messages(conversation.tree, conversation.open_message))

    def _show_message(self, message: str) -> None:
        conversation = self._conversation
        known = conversation.tree.messages.get(message)
        if known is not None:
            shown = shown_message(conversation.tree, known, conversation.open_message)
            self._pane.message_list.update_message(shown)

    def _on_piece(self, piece: Append) -> None:
        self._pane.message_list.append(piece.message, piece.content, piece.reasoning)

    def _on_state_changed(self, state: ModelState) -> None:
        pane = self._pane
        if state is ModelState.READY:
            pane.set_ready(True)
        elif state is ModelState.LOADING:
            pane.set_ready(False, tr("Loading…"))
            pane.set_context_full(False)
        elif state is not ModelState.GENERATING:
            pane.set_ready(False)
        pane.set_answering(self._conversation.is_answering)

    def _on_ended(self, event: OutOfMemory | Failed | Crashed | Cancelled) -> None:
        self._pane.set_crashed(isinstance(event, Crashed))

    def _on_reading(self, event: Reading) -> None:
        if event.request != self._conversation.asked_request or not self._conversation.is_answering:
            return
        if event.prompt_tokens <= event.read_tokens:
            self._pane.show_reading(None)
            if event.request != self._read:
                self._read = event.request
                self._pane.show_context([_history(event.prompt_tokens)], self._model.loading.snapshot.context_size)
            return
        words = tr(
            "reading {read_tokens} of {prompt_tokens} tokens",
            read_tokens=format_count(event.read_tokens),
            prompt_tokens=format_count(event.prompt_tokens),
        )
        left = left_words(self._pace.left_s(event))
        self._pane.show_reading(event.read_tokens / event.prompt_tokens, f"{words}{left}")

    def _on_answer_finished(self, event: Done) -> None:
        self._pane.set_answering(False)
        self._pane.show_remark(event.replaced)
        if event.replaced_for_log != self._logged:
            self._logged = event.replaced_for_log
            if self._logged:
                _log.warning("%s", self._logged)
        is_full = event.stop_reason == "context_full" and self._conversation.answering.overflow == "stop"
        self._pane.set_context_full(is_full)

    def _on_restored(self, restored: Restored) -> None:
        if restored.tokens:
            words = tr("{tokens} tokens restored: they are not read again.", tokens=format_count(restored.tokens))
        else:
            words = tr("This conversation is read again. {refusal}", refusal=restored.refusal)
        self._pane.show_remark(words)

    def _on_context_use(self, use: ContextFill) -> None:
        """Show what is known at once; the parts follow when they are counted."""
        self._pane.show_context(None if use.used is None else [_history(use.used)], use.total)
        if use.total is not None and (use.used or self._conversation.tree.messages):
            self._counter.count(self._conversation.counted_chat(use.used or None))

    def _on_counted(self, use: ContextUse) -> None:
        system = ContextPart(tr("system prompt"), use.system, "kv")
        files = ContextPart(tr("attachments"), use.attachments, "experts")
        parts = [part for part in (system, files) if part.tokens]
        self._pane.show_context([*parts, _history(use.history)], use.n_ctx, reserve=use.reserve)

    # ------------------------------------------------------------------ from the pane

    def _on_draft(self, text: str) -> None:
        chat = self._conversation.chat
        if text != chat.draft:
            self._conversation.change_chat(msgspec.structs.replace(chat, draft=text))

    def _on_action(self, action: MessageAction) -> None:
        conversation = self._conversation
        match action.kind:
            case "edit":
                conversation.edit(action.message, action.text)
            case "regenerate":
                conversation.regenerate(action.message)
            case "continue":
                conversation.go_on(action.message)
            case "answer_now":
                conversation.answering.answer_now()
            case "branch":
                conversation.branch(action.message)
            case "pin":
                conversation.toggle_pin(action.message)
            case "older":
                conversation.step_version(action.message, -1)
            case "newer":
                conversation.step_version(action.message, 1)
            case "delete":
                before = conversation.delete_turn(action.message)
                self._before_delete, self._after_delete = before, conversation.tree
                self._pane.offer_undo(before is not None)

    def _on_undo(self) -> None:
        before = self._before_delete
        self._forget_deletion()
        if before is not None:
            self._conversation.restore(before)

    def _forget_deletion(self) -> None:
        self._before_delete, self._after_delete = None, MessageTree()
        self._pane.offer_undo(False)


def _history(tokens: int) -> ContextPart:
    return ContextPart(tr("questions, answers and the template's marks"), tokens, "weights")
