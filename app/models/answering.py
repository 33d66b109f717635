"""The driver of `engine.chat.answer` in the window: carries out the effects of one model's answers without waiting.

It does not depend on which conversation is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from PySide6.QtCore import QObject, QTimer, Signal

from app.models.loading import AnswerLost, Loading
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.chat import answer as core
from engine.chat.answer import AnswerRun, Append, Finish
from engine.chat.context import Overflow
from engine.chat.conversation import Conversation as Chat
from engine.chat.message import Message
from engine.chat.tree import MessageTree
from engine.planning.plan.preview import LoadedLayout
from engine.runtime.protocol.messages import Counted
from engine.runtime.session.events import Answered, Done, Shifted, Token

KEEP_INTERVAL_MS = 30
"""Tokens within this time are stored and painted together."""

Then = Callable[[], None]
"""Called in the GUI thread when a change is on disk, or could not be stored. Text is painted only then, so that a
crash does not lose text that people have seen."""


class ChatStorage:
    """Interface for storing conversations. Calls do not wait; changes are stored in their order.

    This base class stores nothing.
    """

    def save(self, chat: Chat, before: Chat | None) -> None:
        """Store a conversation: a new one if `before` is None, else its differences from `before`."""

    def apply(self, chat: str, before: MessageTree, after: MessageTree) -> None:
        """Store the changes of a conversation's messages."""

    def keep_file(self, data: bytes) -> None:
        """Store the bytes of an attachment, before the message that has it."""

    def read_files(self, names: Sequence[str], then: Callable[[Mapping[str, bytes]], None]) -> None:
        """Call `then` with the bytes of attachments by their SHA-256, without those that are not stored."""
        then({})

    def append(self, piece: Append, then: Then) -> None:
        """Store more of an answer that is being written."""
        then()

    def finish(self, chat: str, message: Message, then: Then) -> None:
        """Store an answer that has ended."""
        then()


class StateStorage:
    """Interface for saving and restoring the KV-cache state of one model's conversations. Calls do not wait.

    `chat`: the id of a conversation.
    `request`: the number of the request for an answer.
    This base class saves nothing, so that the model reads each conversation again.
    """

    def before_answer(self, chat: str, then: Callable[[], None], *, goes_on: bool) -> None:
        """Call `then` when the saved state of a conversation is restored, or if there is none.

        `goes_on`: whether the conversation has earlier messages.
        """
        then()

    def asked(self, chat: str, request: int) -> None:
        """An answer has begun."""

    def answered(self, chat: str, request: int, tokens: int) -> None:
        """An answer has ended. `tokens`: length of the conversation in the KV cache."""


class Answering(QObject):
    """Asks one model for answers, one at a time."""

    begun = Signal()
    changed = Signal(AnswerRun)
    """Its message has changed."""
    written = Signal(AnswerRun, Append)
    """A piece of its text may be painted."""
    overflow_asked = Signal(str)
    """The context is full; a person answers with `answer_overflow`. Empty: the question is withdrawn."""
    notice_given = Signal(AnswerRun, str)
    """A sentence about the answer that is being written."""
    finished = Signal(AnswerRun, Finish)
    kept = Signal(str)
    """The complete answer with this id is stored."""

    def __init__(self, loading: Loading, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._loading = loading
        self.storage = ChatStorage()
        self.states = StateStorage()
        self.overflow: Overflow = "drop"
        """The action if the context is full."""
        self.answer: AnswerRun | None = None
        """The answer that is being written."""
        self.request: int | None = None
        """The number of its request; None: the model has not been asked yet."""
        self._count: int | None = None
        """The number of the request that counts its prompt; None: none runs."""
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(KEEP_INTERVAL_MS)
        self._timer.timeout.connect(self._flush)
        loading.bridge.token.connect(self._on_token)
        loading.bridge.shifted.connect(self._on_shifted)
        loading.answered.connect(self._on_done)
        loading.bridge.answered.connect(self._on_counted)
        loading.answer_lost.connect(self._on_lost)
        loading.loaded_changed.connect(self._on_loaded_changed)

    # ------------------------------------------------------------------ what people do

    def begin(self, run: AnswerRun) -> None:
        """Begin to write an answer."""
        self.answer, self.request, self._count = run, None, None
        self.begun.emit()
        self._do(run, run.begin())

    def stop(self) -> None:
        """Stop the answer. Its text so far is kept."""
        run = self.answer
        if run is None:
            self._loading.stop_answer()
            return
        self._do(run, run.stop())

    def answer_overflow(self, leave_out: bool) -> None:
        """Drop the oldest turns and go on, or do not send the question."""
        if self.answer is not None:
            self._do(self.answer, self.answer.answer_overflow(leave_out))

    def answer_now(self) -> None:
        """Stop the thought, and let the model answer with it as it is."""
        if self.answer is not None:
            self._do(self.answer, self.answer.answer_now())

    # ------------------------------------------------------------------ effects

    def _do(self, run: AnswerRun, effects: core.Effects) -> None:
        """Carry out effects. Effects of an answer that was replaced meanwhile are dropped."""
        for effect in effects:
            # An effect may end the answer, or a receiver may have begun another one.
            if run is not self.answer:
                return
            try:
                self._do_one(run, effect)
            except EngineError as error:
                self._do(run, run.fail(error.summary()))

    def _do_one(self, run: AnswerRun, effect: core.Effect) -> None:
        match effect:
            case core.Restore():
                self.states.before_answer(run.chat, lambda: self._do(run, run.restored()), goes_on=len(run.path) > 1)
            case core.Count():
                self._count = self._loading.ask(effect.request)
            case core.AskOverflow():
                self.overflow_asked.emit(effect.sentence)
            case core.Notice():
                self.changed.emit(run)  # The note below the answer says it.
                self.notice_given.emit(run, effect.sentence)
            case core.ReadFiles():
                self.storage.read_files(effect.names, lambda files: self._do(run, run.files_read(files)))
            case core.Ask():
                self.request = self._loading.generate(effect.request)
                self.states.asked(run.chat, self.request)
            case core.StopAnswer():
                self._loading.stop_answer()
            case Append():
                then = partial(self._on_written, run, effect)
                self.storage.append(effect, then)
            case Finish():
                self._finish(run, effect)

    def _on_written(self, run: AnswerRun, piece: Append) -> None:
        """Show a stored piece, unless the answer has ended: then it is shown complete."""
        if run is self.answer and not run.has_ended:
            run.written(piece)
            self.changed.emit(run)
            self.written.emit(run, piece)

    def _finish(self, run: AnswerRun, end: Finish) -> None:
        # Text that waits for the timer is part of the complete message.
        self._timer.stop()
        if end.done is not None and self.request is not None:
            # After a context shift the KV state is not that of the conversation: it is as if there were none.
            tokens = 0 if end.done.dropped_tokens else end.done.prompt_tokens + end.done.generated_tokens
            self.states.answered(run.chat, self.request, tokens)
        self.changed.emit(run)
        # Set before the signals: a receiver may begin the next answer.
        self.answer = None
        self.storage.finish(run.chat, end.message, lambda: self.kept.emit(end.message.id))
        self.finished.emit(run, end)

    # ------------------------------------------------------------------ what the model says

    def _on_counted(self, event: Answered) -> None:
        run = self.answer
        if run is None or event.request != self._count:
            return
        self._count = None
        if isinstance(event.answer, Counted):
            self._do(run, run.counted(event.answer))
        else:
            self._do(run, run.fail(tr("The tokens of the prompt could not be counted. Send the question again.")))

    def _on_token(self, event: Token) -> None:
        run = self.answer
        if run is not None and self.request is not None and event.request == self.request:
            run.token(event.text, event.choices)
            # Not restarted: with many tokens a second the timer would never fire.
            if not self._timer.isActive():
                self._timer.start()

    def _on_shifted(self, event: Shifted) -> None:
        run = self.answer
        if run is not None and self.request is not None and event.request == self.request:
            self._do(run, run.shifted(event))

    def _flush(self) -> None:
        if self.answer is not None:
            self._do(self.answer, self.answer.flush())

    def _on_done(self, event: Done) -> None:
        run = self.answer
        if run is not None and self.request is not None and event.request == self.request:
            self._do(run, run.done(event))

    def _on_loaded_changed(self, loaded: LoadedLayout | None) -> None:
        """End an answer whose request was not sent yet. A request that was sent ends with an event of its own."""
        run = self.answer
        # An answer that waits for a restored state or a count of tokens has no event that would end it.
        if loaded is None and run is not None and self.request is None and self._count is None:
            self._do(run, run.fail(tr("The model was unloaded.")))

    def _on_lost(self, lost: AnswerLost) -> None:
        run = self.answer
        if run is not None and lost.request in (self.request, self._count):
            self._do(run, run.fail(lost.sentence))
