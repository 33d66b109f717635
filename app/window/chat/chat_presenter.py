"""The presenter of one model's chat: messages, questions, reading progress, context meter and status."""

from __future__ import annotations

import logging
from collections.abc import Callable

from PySide6.QtCore import QObject, QTimer, QUrl
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
from app.models.unloaded_counter import UnloadedCounter
from app.notices import Notice
from app.window.chat.attach_presenter import AttachPresenter
from app.window.status_line import StatusLine
from engine.base.language import tr
from engine.base.units import format_count
from engine.base.values import replace
from engine.chat.answer import AnswerRun, Append
from engine.chat.context import ContextUse
from engine.chat.message import Cut
from engine.chat.tree import MessageTree
from engine.model.demo.speaking import sample_prompts
from engine.model.gguf.model_file import ModelFile
from engine.runtime.probing.vocabulary import VocabularyCounter
from engine.runtime.session.events import Done, Reading, Token
from engine.runtime.session.state import RequestState
from engine.runtime.session.status import ModelStatus, Phase
from widgets.chat.chat_heading import ContextSegment
from widgets.chat.chat_pane import ChatPane
from widgets.chat.shown import MessageAction, ShownMessage

_log = logging.getLogger("layerdeck.chat")
_ASKING = ("edit", "regenerate", "continue", "answer")
"""Actions on a message that send a request to the model."""


class ChatPresenter(QObject):
    """Connects a model's conversation with its chat pane.

    Each model has a presenter and a pane, so an answer is also streamed while another model is current. The pane emits
    `send_requested` when the user sends a question; `_on_send` sends it with its attached files.
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
        vocabulary: VocabularyCounter,
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
        """The model file to which the shown sample questions belong; None before a file was opened."""
        self._shown_chat = ""
        self._context_used = 0
        """Number of tokens in the context during an answer: of the prompt read so far, then also of the answer."""
        self._cut: Cut | None = None
        """The turns that a full context leaves out of the prompt, and that the shown messages therefore mark."""
        self._pace = ReadingPace()
        self._logged = ""
        """The last logged message about a chat template that cannot be used; empty if none was logged."""
        self._waiting_question: str | None = None
        """The question that waits until a parked (temporarily unloaded) model is loaded again; None if none waits."""
        self._before_delete: MessageTree | None = None
        """The messages before a deletion, for Undo; None if there is no deletion that can be undone."""
        self._after_delete = MessageTree()
        loading, conversation = model.loading, model.conversation
        self._conversation = conversation
        model.status_changed.connect(self._on_status_changed)
        loading.bridge.reading.connect(self._on_reading)
        loading.bridge.token.connect(self._on_token)
        loading.bridge.snapshot.connect(self._on_snapshot)
        conversation.shown_changed.connect(self._show_messages)
        conversation.chat_changed.connect(self._show_chat)
        conversation.message_changed.connect(self._show_message)
        conversation.piece_kept.connect(self._on_piece)
        conversation.answer_finished.connect(self._on_answer_finished)
        conversation.context_use_changed.connect(self._on_context_use)
        conversation.restored.connect(self._on_restored)
        self._counter = ContextCounter(loading, self)
        self._unloaded = UnloadedCounter(model, vocabulary, background, self)
        self._connect_counters()
        self._connect_parking()
        self._files.attacher.changed.connect(self._on_files_changed)
        self._files.attacher.refused.connect(self._on_file_refused)
        conversation.answering.changed.connect(self._on_answer_changed)
        conversation.answering.finished.connect(self._on_answer_ended)
        conversation.answering.notice_given.connect(self._on_answer_notice)
        conversation.overflow_asked.connect(pane.overflow_banner.ask)
        pane.overflow_banner.answered.connect(conversation.answering.answer_overflow)
        self._connect_pane()
        self._show_chat()
        self._show_messages()
        self._on_status_changed(model.status)

    def _connect_pane(self) -> None:
        pane = self._pane
        pane.send_requested.connect(self._on_send)
        pane.start_requested.connect(self._on_start)
        pane.reload_requested.connect(lambda: self._loader.reload(self._model))
        pane.stop_requested.connect(self._conversation.answering.stop)
        pane.draft_changed.connect(self._on_draft)
        pane.acted.connect(self._on_action)
        pane.undo_requested.connect(self._on_undo)
        # Only `LINK_SCHEMES` (http, https, mailto) arrive here; other links of an answer are text.
        pane.link_opened.connect(lambda address: QDesktopServices.openUrl(QUrl(address)))

    def _connect_parking(self) -> None:
        def later() -> None:
            QTimer.singleShot(0, self, self._forget_waiting)

        self._model.loading.ended.connect(lambda _event: later())
        # Without a question any more, the load begins now, or the person has chosen Cancel.
        self._loader.question_changed.connect(lambda question: None if question is not None else later())

    def _connect_counters(self) -> None:
        conversation = self._conversation
        self._counter.counted.connect(self._on_counted)
        self._unloaded.counted.connect(self._on_counted)
        for changed in (self._model.planned_changed, conversation.chat_changed, conversation.shown_changed):
            changed.connect(self._count_unloaded)
        self._files.attacher.changed.connect(self._count_unloaded)

    # ------------------------------------------------------------------ to the pane

    def _show_chat(self) -> None:
        chat = self._conversation.chat
        self._pane.show_title(chat.title)
        if chat.id != self._shown_chat:
            self._shown_chat = chat.id
            self._waiting_question = None  # It was in the input of the conversation before.
            self._forget_deletion()
            self._pane.set_context_full(False)
            self._pane.show_remark("")  # It was about the conversation before.
            self._pane.close_find()
            self._pane.show_draft(chat.draft)

    def _show_messages(self) -> None:
        conversation = self._conversation
        # Undo would also undo what was said after the deletion.
        if self._before_delete is not None and conversation.tree.messages != self._after_delete.messages:
            self._forget_deletion()
        self._show_answering()
        self._cut = self._cut_of_answer()
        self._pane.show_messages(self._shown())

    def _shown(self) -> tuple[ShownMessage, ...]:
        conversation = self._conversation
        return shown_messages(
            conversation.tree, conversation.open_message, conversation.left_out, conversation.chat.results
        )

    def _show_answering(self) -> None:
        is_lost = self._model.loading.snapshot.loaded is None
        self._pane.set_answering(self._conversation.is_answering, is_lost=is_lost)

    def _cut_of_answer(self) -> Cut | None:
        answer = self._conversation.answering.answer
        return None if answer is None or self._conversation.open_message is None else answer.message.cut

    def _show_message(self, message: str) -> None:
        conversation = self._conversation
        known = conversation.tree.messages.get(message)
        if known is not None:
            shown = shown_message(
                conversation.tree, known, conversation.open_message, conversation.left_out, conversation.chat.results
            )
            self._pane.message_list.update_message(shown)

    def _on_piece(self, piece: Append) -> None:
        if piece.calls:
            self._show_message(piece.message)
        else:
            self._pane.message_list.append(piece.message, piece.content, piece.reasoning)
        self._show_growing()

    def _on_token(self, event: Token) -> None:
        if event.request == self._conversation.pending_request and event.context_used is not None:
            self._context_used = event.context_used

    def _on_answer_changed(self, run: AnswerRun) -> None:
        """Mark the messages that are left out of the prompt because the context is full.

        The messages are drawn again only if the answer `run` leaves out others than before; most changes only add text.
        """
        if run.message.cut != self._cut and self._conversation.open_message is not None:
            self._cut = run.message.cut
            self._pane.show_messages(self._shown(), at_end=False)

    def _on_answer_notice(self, run: AnswerRun, sentence: str) -> None:
        if run.chat == self._conversation.chat.id:
            self._pane.show_remark(sentence)

    def _show_growing(self) -> None:
        """Show the number of tokens in the context while a prompt is read or an answer is written."""
        total = self._model.loading.snapshot.context_size
        if self._conversation.open_message is not None and total is not None:
            self._pane.show_context([_history(self._context_used)], total)

    def _on_status_changed(self, status: ModelStatus) -> None:
        pane, file = self._pane, self._model.file
        pane.set_status(status)
        self._count_unloaded()
        if status.phase is Phase.READY and self._waiting_question is not None:
            # Later, when everybody knows the loaded model.
            QTimer.singleShot(0, self, self._ask_now)
        # The next context may be longer.
        if status.phase is Phase.LOADING:
            pane.set_context_full(False)
        self._show_answering()
        # Sample questions depend on the model's language, which only another file changes.
        if file is not self._file:
            self._file = file
            pane.set_sample_prompts(() if file is None else sample_prompts(file))

    def _on_reading(self, event: Reading) -> None:
        """Show how much of the prompt is read, and the remaining time, in the pane and on the status line."""
        left = left_words(self._pace.left_s(event))
        # An event of a request that was stopped or lost meanwhile comes too late.
        if event.prompt_tokens and event.request in self._being_read():
            read, whole = format_count(event.read_tokens), format_count(event.prompt_tokens)
            text = tr("Processing the prompt: {done} of {total} tokens", done=read, total=whole) + left
            is_current = self._models.current is self._model
            self._set_busy(text if is_current else f"{self._model.name}: {text}")
        if event.request != self._conversation.pending_request or not self._conversation.is_answering:
            return
        # While an answer is written or stopped, a `Reading` event only shows that the engine still works.
        if event.request in self._being_read():
            self._context_used = event.read_tokens
            self._show_growing()
        if event.prompt_tokens <= event.read_tokens:
            self._pane.show_reading(None)
            return
        words = tr(
            "processing the prompt: {read_tokens} of {prompt_tokens} tokens",
            read_tokens=format_count(event.read_tokens),
            prompt_tokens=format_count(event.prompt_tokens),
        )
        self._pane.show_reading(event.read_tokens / event.prompt_tokens, f"{words}{left}")

    def _on_snapshot(self) -> None:
        if not self._being_read():
            self._set_busy("")
        if self._conversation.is_answering and self._model.loading.snapshot.loaded is None:
            self._show_answering()

    def _being_read(self) -> list[int]:
        """Return the numbers of the requests whose prompt is being processed."""
        return [run.id for run in self._model.loading.snapshot.requests if run.state is RequestState.READING]

    def _set_busy(self, text: str) -> None:
        self._status_line.set_busy(f"reading {self._model.number}", text)

    def _on_answer_ended(self) -> None:
        """Show that an answer has ended.

        The signals for changed messages and for a changed status do not suffice: an answer that fails may cause
        neither.
        """
        self._show_answering()

    def _on_answer_finished(self, event: Done) -> None:
        self._pane.show_remark(event.replaced)
        # The same sentence is logged once and not after each answer.
        if event.replaced_for_log != self._logged:
            self._logged = event.replaced_for_log
            if self._logged:
                _log.warning("%s", self._logged)
        # With dropping switched on, the next question makes room by itself.
        is_full = event.stop_reason == "context_full" and self._conversation.answering.overflow == "stop"
        self._pane.set_context_full(is_full)

    def _on_restored(self, restored: Restored) -> None:
        if restored.tokens:
            words = tr("Saved KV state restored: {tokens} tokens.", tokens=format_count(restored.tokens))
        else:
            words = tr("The model will process the whole conversation again. {refusal}", refusal=restored.refusal)
        self._pane.show_remark(words)

    def _on_context_use(self, use: ContextFill) -> None:
        """Show how many tokens are in the context, and start to count the tokens of each part of the prompt.

        Parts are, for instance, the system prompt and the attachments. Their numbers are shown when they are known.
        """
        self._pane.show_context(None if use.used is None else [_history(use.used)], use.total)
        # A load with another context may let the model see messages that the one before had no room for.
        marked = {message.id for message in self._pane.message_list.messages if message.is_left_out}
        if marked != self._conversation.left_out:
            self._pane.show_messages(self._shown(), at_end=False)
        if use.total is not None and (use.used or self._conversation.tree.messages):
            self._counter.count(self._conversation.counted_chat())

    def _count_unloaded(self) -> None:
        """Count the tokens of the conversation with the unsent question, if the model is open but not loaded."""
        if not self._unloaded.is_wanted:
            self._unloaded.forget()
            return
        files = [each.attachment for each in self._files.attacher.files if each.attachment is not None]
        chat = self._conversation.unloaded_chat(files)
        if chat is None:
            self._unloaded.forget()
            self._pane.show_context(None, None)
        else:
            self._unloaded.count(chat)

    def _on_counted(self, use: ContextUse) -> None:
        system = ContextSegment(tr("system prompt"), use.system, "kv")
        files = ContextSegment(tr("attachments"), use.attachments, "experts")
        parts = [part for part in (system, files) if part.tokens]
        note = (
            ""
            if not use.uncounted_media
            else tr("The tokens of images and sounds are counted when the model is loaded.")
        )
        self._pane.show_context([*parts, _history(use.history)], use.n_ctx, reserve=use.reserve, note=note)

    # ------------------------------------------------------------------ from the pane

    def _on_send(self, text: str) -> None:
        if self._conversation.tools_error:
            self._pane.show_draft(text)
            self._show_answering()
            self._show_refusal()
        elif self._conversation.can_send:
            self._pane.show_remark("")  # it was about the prompt before
            # Taken only for a question that can be asked: a refused one keeps its files.
            self._conversation.send(text, self._files.attacher.take())
        elif self._model.is_parked:
            # The text stays in the input until the model is loaded, so that a load that fails does not lose it.
            self._pane.show_draft(text)
            self._show_answering()
            self._waiting_question = text.strip()
            self._on_start()

    def _ask_now(self) -> None:
        """Send the question that waited until its parked (temporarily unloaded) model was loaded.

        Nothing is sent if the user has changed the text of the question meanwhile.
        """
        if self._files.attacher.is_reading:
            return  # `_on_files_changed` sends it with the file.
        text, asked = self._pane.prompt_edit.toPlainText().strip(), self._waiting_question
        self._waiting_question = None
        if text == asked and (text or self._files.attacher.files) and self._conversation.can_send:
            self._pane.show_draft("")
            self._on_draft("")
            self._on_send(text)

    def _on_files_changed(self) -> None:
        if self._waiting_question is not None and self._conversation.can_send:
            # Later, when everybody knows the loaded model, which may have caused this.
            QTimer.singleShot(0, self, self._ask_now)

    def _on_file_refused(self, reason: str) -> None:
        """Cancel the question that waits until the model is loaded, if an attached file is refused.

        Otherwise the question would be sent without the file.
        """
        if reason:
            self._waiting_question = None

    def _forget_waiting(self) -> None:
        """Drop the question that waits until the model is loaded, unless a load still runs.

        Called after a load has failed or was cancelled. The text of the question stays in the input field.
        """
        if not self._model.status.is_loading:
            self._waiting_question = None

    def _on_start(self) -> None:
        """Load the model of this chat, or open a model if the chat has none."""
        if self._model.file is None:
            self._open_file()
            return
        # The right one of two chats may belong to a model that is not the current one.
        self._opener.show(self._model)
        self._loader.load()

    def _on_draft(self, text: str) -> None:
        chat = self._conversation.chat
        if text != chat.draft:
            self._conversation.change_chat(replace(chat, draft=text))

    def _on_action(self, action: MessageAction) -> None:
        conversation = self._conversation
        if action.kind in _ASKING and (conversation.tools_error or not conversation.can_send):
            self._show_refusal()
            if action.kind == "edit" and (bubble := self._pane.message_list.bubble(action.message)):
                bubble.start_editing(action.text)  # The text is not lost.
            return
        match action.kind:
            case "edit":
                known = conversation.tree.messages[action.message]
                edit = conversation.edit_result if known.role == "tool" else conversation.edit
                edit(action.message, action.text)
            case "type_result" | "result" | "answer":
                self._on_result(action)
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

    def _on_result(self, action: MessageAction) -> None:
        """Carry out an action of the user on the results of tool calls, which the user types into the chat.

        Depending on `action.kind`, store a half-typed result, give a result to the model, or let the model answer with
        the results so far.
        """
        conversation = self._conversation
        match action.kind:
            case "type_result":
                conversation.type_result(action.message, action.call, action.text)
                self._show_message(action.message)  # a bubble that is made anew has the text
            case "result":
                if conversation.tools_error or not conversation.give_result(action.call, action.text):
                    self._show_refusal()
            case "answer":
                conversation.answer_results()

    def _show_refusal(self) -> None:
        """Show on the status line why the model cannot answer a question now."""
        if fault := self._conversation.tools_error:
            sentence = tr("{fault} Edit the tools in the settings of this conversation.", fault=fault)
        elif self._conversation.is_answering:
            sentence = tr("The model is answering. Wait for the end of the answer, or stop it.")
        else:
            sentence = tr("Load the model first.")
        self._status_line.show_notice(Notice(sentence, bad=True))

    def _on_undo(self) -> None:
        before = self._before_delete
        self._forget_deletion()
        if before is not None:
            self._conversation.restore(before)

    def _forget_deletion(self) -> None:
        self._before_delete, self._after_delete = None, MessageTree()
        self._pane.offer_undo(False)


def _history(tokens: int) -> ContextSegment:
    return ContextSegment(tr("questions, answers and chat template"), tokens, "weights")
