"""The chat of one model: messages, questions, what is read of them, and what is missing before it can answer."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
from PySide6.QtCore import QObject, QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QWidget

from app.background import Background
from app.chats.archive import ChatArchive
from app.chats.shown_messages import shown_message, shown_messages
from app.load.loader import Loader
from app.models.context_counter import ContextCounter
from app.models.conversation import ContextFill, Restored
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.models.opener import ModelOpener
from app.models.reading_pace import ReadingPace, left_words
from app.window.chat.attach_presenter import AttachPresenter
from app.window.status_line import StatusLine
from engine.base.language import tr
from engine.chat.answer import Append
from engine.chat.context import ContextUse
from engine.chat.message import Message
from engine.chat.tree import MessageTree
from engine.model.demo.speaking import sample_questions
from engine.model.gguf.model_file import ModelFile
from engine.runtime.session.events import Done, Reading
from engine.runtime.session.state import RequestState
from engine.runtime.session.status import ModelStatus, Phase
from widgets.chat.chat_heading import ContextPart
from widgets.chat.chat_pane import ChatPane
from widgets.chat.shown import MessageAction
from widgets.common.counts import format_count

_log = logging.getLogger("layerdeck.chat")


class ChatPresenter(QObject):
    """Carries values between a model's conversation and its chat pane.

    It goes on while another model is current: an answer streams into its own pane. Send goes from the pane to the
    conversation here, with the files that were attached when it was pressed.
    """

    def __init__(
        self,
        model: OpenModel,
        pane: ChatPane,
        *,
        models: OpenModels,
        opener: ModelOpener,
        loader: Loader,
        archive: ChatArchive,
        background: Background,
        open_file: Callable[[], None],
        status_line: StatusLine,
        window: QWidget,
    ) -> None:
        super().__init__(window)
        self._model, self._models, self._pane = model, models, pane
        self._opener, self._loader, self._open_file = opener, loader, open_file
        self._status_line = status_line
        self._files = AttachPresenter(model, archive, background, pane, window)
        self._file: ModelFile | None = None
        """The file that sample questions are shown for."""
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
        model.status_changed.connect(self._on_status_changed)
        loading.bridge.reading.connect(self._on_reading)
        loading.bridge.snapshot.connect(self._on_snapshot)
        conversation.shown_changed.connect(self._show_messages)
        conversation.chat_changed.connect(self._show_chat)
        conversation.message_changed.connect(self._show_message)
        conversation.piece_kept.connect(self._on_piece)
        conversation.answer_finished.connect(self._on_answer_finished)
        conversation.context_use_changed.connect(self._on_context_use)
        conversation.restored.connect(self._on_restored)
        conversation.question_returned.connect(self._on_returned)
        self._counter = ContextCounter(loading, self)
        self._counter.counted.connect(self._on_counted)
        conversation.answering.finished.connect(self._on_answer_ended)
        conversation.overflow_asked.connect(pane.overflow_banner.ask)
        pane.overflow_banner.answered.connect(conversation.answering.answer_overflow)
        pane.send_requested.connect(self._on_send)
        pane.start_requested.connect(self._on_start)
        pane.reload_requested.connect(lambda: loader.reload(model))
        pane.stop_requested.connect(conversation.answering.stop)
        pane.draft_changed.connect(self._on_draft)
        pane.acted.connect(self._on_action)
        pane.undo_requested.connect(self._on_undo)
        pane.link_opened.connect(lambda address: QDesktopServices.openUrl(QUrl(address)))
        self._show_chat()
        self._show_messages()
        self._on_status_changed(model.status)

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

    def _on_status_changed(self, status: ModelStatus) -> None:
        pane, file = self._pane, self._model.file
        pane.set_status(status)
        if status.phase is Phase.LOADING:
            pane.set_context_full(False)
        pane.set_answering(self._conversation.is_answering)
        if file is not self._file:
            self._file = file
            pane.set_sample_questions(() if file is None else sample_questions(file))

    def _on_reading(self, event: Reading) -> None:
        """Show how much of a question is read, and how long the rest takes, in the pane and on the status line."""
        left = left_words(self._pace.left_s(event))
        # What is said of a request that was stopped or lost meanwhile comes too late.
        if event.prompt_tokens and event.request in self._being_read():
            read, whole = format_count(event.read_tokens), format_count(event.prompt_tokens)
            text = tr("Reading the question: {read} of {whole} tokens", read=read, whole=whole) + left
            is_current = self._models.current is self._model
            self._set_busy(text if is_current else f"{self._model.name}: {text}")
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
        self._pane.show_reading(event.read_tokens / event.prompt_tokens, f"{words}{left}")

    def _on_snapshot(self) -> None:
        if not self._being_read():
            self._set_busy("")

    def _being_read(self) -> list[int]:
        return [run.id for run in self._model.loading.snapshot.requests if run.state is RequestState.READING]

    def _set_busy(self, text: str) -> None:
        self._status_line.set_busy(f"reading {self._model.number}", text)

    def _on_answer_ended(self) -> None:
        """An answer has ended, complete or not. One that failed changes neither the messages nor the status."""
        self._pane.set_answering(self._conversation.is_answering)

    def _on_answer_finished(self, event: Done) -> None:
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

    def _on_send(self, text: str) -> None:
        if self._conversation.can_ask:
            self._conversation.send(text, self._files.attacher.take())

    def _on_returned(self, question: Message) -> None:
        self._pane.return_question(question.content)
        self._files.attacher.give_back(question.attachments)

    def _on_start(self) -> None:
        """Open a model, or load the one that this is the chat of."""
        if self._model.file is None:
            self._open_file()
            return
        # A chat beside another one may belong to a model that is not the current one.
        self._opener.show(self._model)
        self._loader.load()

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
