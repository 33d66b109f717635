"""Writing one answer at a time: what is kept of its conversation restored, counted, asked for, and kept as it comes.

Which conversation is shown meanwhile is of no matter here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from PySide6.QtCore import QObject, QTimer, Signal

from app.models.answer import Answer, Piece
from app.models.chat_keeper import ChatKeeper, NoKeeper
from app.models.context_fit import ContextQuestion, may_be_too_long, shown_path
from app.models.loading import AnswerLost, Loading
from app.models.state_keeper import NoStates, StateKeeper
from engine.chats.asking import answer_request, chat_messages, names_of_media, with_files
from engine.chats.context import Overflow
from engine.chats.cuts import cut_that_leaves_out
from engine.chats.message import Message, MessageState
from engine.errors import EngineError
from engine.language import tr
from engine.protocol.messages import ChatMessage, Counted
from engine.session.events import Answered, Done, Token

KEEP_INTERVAL_MS = 30
"""Tokens that come faster are kept, and painted, together."""


class Answering(QObject):
    """Asks the child of a `Loading`, and tells what becomes of it."""

    begun = Signal(Answer)
    text = Signal(str)
    changed = Signal(Answer)
    """Its message is another one than before."""
    piece_kept = Signal(Answer, Piece)
    overflow_asked = Signal(str)
    """The context is full: `answer_overflow` says whether turns are left out. Empty: nobody asks any more."""
    finished = Signal(Answer, Done)
    failed = Signal(Answer, str)
    kept = Signal(str)
    """The answer of this id is kept as it ended."""

    def __init__(self, loading: Loading, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._loading = loading
        self.keeper: ChatKeeper = NoKeeper()
        self.states: StateKeeper = NoStates()
        self.overflow: Overflow = "drop"
        """What to do when the context is full."""
        self.answer: Answer | None = None
        """The one that is being written."""
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(KEEP_INTERVAL_MS)
        self._timer.timeout.connect(self._keep_waiting)
        loading.bridge.token.connect(self._on_token)
        loading.answered.connect(self._on_answered)
        loading.bridge.answered.connect(self._on_counted)
        loading.answer_lost.connect(self._on_answer_lost)

    # ------------------------------------------------------------------ asking

    def begin(self, answer: Answer) -> None:
        """Have an answer written, once the model holds what is kept of its conversation."""
        self.answer = answer
        self.begun.emit(answer)
        path = answer.tree.path_to(answer.message.parent)
        answer.waits = True
        self.states.before_answer(answer.chat, lambda: self._go_on(answer, path), goes_on=len(path) > 1)

    def stop(self) -> None:
        """End it; what is there stays."""
        answer = self.answer
        if answer is not None and answer.asking is not None:
            self.answer_overflow(False)
        elif answer is not None and (answer.waits or answer.counting is not None):
            self._fail(answer, tr("It was stopped before the model was asked."))
        else:
            self._loading.stop_answer()

    def answer_overflow(self, leave_out: bool) -> None:
        """Go on with a question that the context has no room for, without the oldest turns; or do not ask it."""
        answer = self.answer
        if answer is None or answer.asking is None:
            return
        asking, answer.asking = answer.asking, None
        self.overflow_asked.emit("")
        if leave_out:
            self._take_count(answer, *asking, "drop")
        else:
            self._fail(answer, tr("It was not asked: the context is full."))

    def answer_now(self) -> None:
        """End its thought, and have it answer with what there is."""
        answer = self.answer
        if answer is not None and answer.splitter.is_thinking and not answer.goes_on:
            answer.goes_on = True
            self._loading.stop_answer()

    def _go_on(self, answer: Answer, path: tuple[Message, ...]) -> None:
        if answer is self.answer:
            answer.waits = False
            self._ask(answer, path)

    def _ask(self, answer: Answer, path: tuple[Message, ...], *, is_counted: bool = False) -> None:
        question = ContextQuestion(answer.system, path, answer.left_out, answer.template)
        asked = chat_messages(answer.system, shown_path(path, answer.left_out))
        try:
            if not is_counted and may_be_too_long(asked, self._loading.snapshot.context_size):
                answer.counting = self._loading.ask(question.request), question
            else:
                self._send(answer, asked)
        except EngineError as error:
            self._fail(answer, error.summary())

    def _send(self, answer: Answer, asked: Sequence[ChatMessage]) -> None:
        """Ask the model, once the images and sounds of the conversation are here.

        Raises:
            EngineError: it cannot be asked.
        """
        if names := names_of_media(asked):
            answer.waits = True
            self.keeper.read_files(names, lambda files: self._send_with(answer, asked, files))
        else:
            self._generate(answer, asked)

    def _send_with(self, answer: Answer, asked: Sequence[ChatMessage], files: Mapping[str, bytes]) -> None:
        if answer is not self.answer:
            return
        answer.waits = False
        try:
            self._generate(answer, with_files(asked, files))
        except EngineError as error:
            self._fail(answer, error.summary())

    def _generate(self, answer: Answer, asked: Sequence[ChatMessage]) -> None:
        request = answer_request(asked, answer.settings, begun=answer.begun, template=answer.template)
        answer.request = self._loading.generate(request)
        self.states.asked(answer.chat, answer.request)

    def _on_counted(self, event: Answered) -> None:
        answer = self.answer
        if answer is None or answer.counting is None or answer.counting[0] != event.request:
            return
        (_, question), answer.counting = answer.counting, None
        if not isinstance(event.answer, Counted):
            self._fail(answer, tr("The conversation could not be counted; send it again."))
            return
        self._take_count(answer, question, event.answer, self.overflow)

    def _take_count(self, answer: Answer, question: ContextQuestion, counted: Counted, overflow: Overflow) -> None:
        fit = question.fit(counted, overflow, answer.settings.max_tokens)
        if fit.decision == "ask":
            answer.asking = question, counted
            self.overflow_asked.emit(fit.sentence())
        elif fit.decision != "fits":
            self._fail(
                answer, tr("{sentence} The context has {n_ctx} tokens.", sentence=fit.sentence(), n_ctx=counted.n_ctx)
            )
        else:
            if fit.newly:
                answer.left_out = frozenset(fit.left_out)
                cut = cut_that_leaves_out(question.path, fit.left_out, counted.n_ctx)
                answer.put(msgspec.structs.replace(answer.message, cut=cut))
                self.changed.emit(answer)
            self._ask(answer, question.path, is_counted=True)

    # ------------------------------------------------------------------ what comes

    def _on_token(self, event: Token) -> None:
        answer = self.answer
        if answer is None or not answer.is_of(event.request):
            return
        answer.take(event.text, event.choices)
        if not self._timer.isActive():
            self._timer.start()
        self.text.emit(event.text)

    def _keep_waiting(self) -> None:
        answer = self.answer
        if answer is not None and answer.waiting:
            piece = answer.next_piece()
            self.keeper.append(piece.message, piece.text, piece.thinking, lambda: self._paint(answer, piece))

    def _paint(self, answer: Answer, piece: Piece) -> None:
        """Show what is kept; of an answer that is over all of it is shown at once."""
        if answer is self.answer:
            answer.add(piece)
            self.changed.emit(answer)
            self.piece_kept.emit(answer, piece)

    def _on_answered(self, event: Done) -> None:
        answer = self.answer
        if answer is None or answer.request is None or not answer.is_of(event.request):
            return
        answer.rest()
        self.states.answered(answer.chat, answer.request, event.prompt_tokens + event.generated_tokens)
        state: MessageState = "stopped" if event.stop_reason == "stopped" else "done"
        answer.end(state, note=answer.note, stop_reason=event.stop_reason, timings=answer.timings(event))
        self._end(answer)
        self.finished.emit(answer, event)

    def _on_answer_lost(self, lost: AnswerLost) -> None:
        answer = self.answer
        if answer is not None and lost.request in (answer.request, answer.counting and answer.counting[0]):
            self._fail(answer, lost.sentence)

    def _fail(self, answer: Answer, sentence: str) -> None:
        """What came of the answer stays, and the question can be asked again."""
        answer.rest()
        if answer.has_words:
            note = tr("{sentence} What had come is kept.", sentence=sentence)
            answer.end("interrupted", note=note, timings=answer.timings_so_far())
        else:
            answer.end("failed", note=sentence)
        self._end(answer)
        self.failed.emit(answer, sentence)

    def _end(self, answer: Answer) -> None:
        self._timer.stop()
        self.changed.emit(answer)
        self.answer = None
        message = answer.message
        self.keeper.finish(answer.chat, message, lambda: self.kept.emit(message.id))
