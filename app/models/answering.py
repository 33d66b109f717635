"""Writes the answers of one model: carries out the effects of `engine.chat.answer`, with Qt and without waiting.

Which conversation is shown meanwhile does not matter here.
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
from engine.runtime.session.events import Answered, Done, Token

KEEP_INTERVAL_MS = 30
"""Tokens that come faster are written, and painted, together."""

Then = Callable[[], None]
"""Called in the GUI thread once a change is on disk, or cannot be: what is painted survives the end of the process."""


class ChatStorage:
    """Interface for storing conversations: takes changes in their order, and does not wait. This one stores nothing."""

    def save(self, chat: Chat, before: Chat | None) -> None:
        """Store a conversation: new if `before` is None, else what differs from that."""

    def apply(self, chat: str, before: MessageTree, after: MessageTree) -> None:
        """Store the changes of a conversation's messages."""

    def keep_file(self, data: bytes) -> None:
        """Store the bytes of an attachment, before the message that has it."""

    def read_files(self, names: Sequence[str], then: Callable[[Mapping[str, bytes]], None]) -> None:
        """Read attachments by their SHA-256; those that are not stored are left out."""
        then({})

    def append(self, message: str, content: str, reasoning: str, then: Then) -> None:
        """Store more text of an answer that is being written."""
        then()

    def finish(self, chat: str, message: Message, then: Then) -> None:
        """Store an answer that has ended."""
        then()


class StateStorage:
    """Interface for saving and restoring the KV-cache state of one model's conversations; it does not wait.

    `chat` is the id of a conversation, `request` the number of an answer. This one saves nothing, so that each
    conversation is read when it goes on.
    """

    def before_answer(self, chat: str, then: Callable[[], None], *, goes_on: bool) -> None:
        """Call `then` once the saved state of a conversation is in the model, or there is none.

        `goes_on`: whether the conversation has earlier messages.
        """
        then()

    def asked(self, chat: str, request: int) -> None:
        """An answer has begun."""

    def answered(self, chat: str, request: int, tokens: int) -> None:
        """An answer has ended, after which the model holds so many tokens of the conversation."""


class Answering(QObject):
    """Asks the child of a `Loading` for one answer at a time."""

    begun = Signal()
    changed = Signal(AnswerRun)
    """Its message has changed."""
    written = Signal(AnswerRun, Append)
    """A piece of its text may be painted."""
    overflow_asked = Signal(str)
    """The context is full: `answer_overflow` says whether turns are left out. Empty: the question is taken back."""
    finished = Signal(AnswerRun, Finish)
    kept = Signal(str)
    """The answer of this id is stored as it ended."""

    def __init__(self, loading: Loading, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._loading = loading
        self.storage = ChatStorage()
        self.states = StateStorage()
        self.overflow: Overflow = "drop"
        """What to do when the context is full."""
        self.answer: AnswerRun | None = None
        """The answer that is being written."""
        self.request: int | None = None
        """The number of the request for it; None: the model has not been asked yet."""
        self._count: int | None = None
        """The number of the request that counts its prompt."""
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(KEEP_INTERVAL_MS)
        self._timer.timeout.connect(self._flush)
        loading.bridge.token.connect(self._on_token)
        loading.answered.connect(self._on_done)
        loading.bridge.answered.connect(self._on_counted)
        loading.answer_lost.connect(self._on_lost)
        loading.loaded_changed.connect(self._on_loaded_changed)

    # ------------------------------------------------------------------ what people do

    def begin(self, run: AnswerRun) -> None:
        """Have an answer written."""
        self.answer, self.request, self._count = run, None, None
        self.begun.emit()
        self._do(run, run.begin())

    def stop(self) -> None:
        """End the answer; what came stays."""
        run = self.answer
        if run is None:
            self._loading.stop_answer()
            return
        self._do(run, run.stop())

    def answer_overflow(self, leave_out: bool) -> None:
        """Go on without the oldest turns, or do not ask the question that the context has no room for."""
        if self.answer is not None:
            self._do(self.answer, self.answer.answer_overflow(leave_out))

    def answer_now(self) -> None:
        """End the thought, and have the model answer with what there is."""
        if self.answer is not None:
            self._do(self.answer, self.answer.answer_now())

    # ------------------------------------------------------------------ effects

    def _do(self, run: AnswerRun, effects: core.Effects) -> None:
        """Carry out effects; those of an answer that has been replaced are dropped."""
        for effect in effects:
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
            case core.ReadFiles():
                self.storage.read_files(effect.names, lambda files: self._do(run, run.files_read(files)))
            case core.Ask():
                self.request = self._loading.generate(effect.request)
                self.states.asked(run.chat, self.request)
            case core.StopAnswer():
                self._loading.stop_answer()
            case Append():
                then = partial(self._on_written, run, effect)
                self.storage.append(effect.message, effect.content, effect.reasoning, then)
            case Finish():
                self._finish(run, effect)

    def _on_written(self, run: AnswerRun, piece: Append) -> None:
        """Show a piece; an answer that has ended is shown whole at once."""
        if run is self.answer and not run.has_ended:
            run.written(piece)
            self.changed.emit(run)
            self.written.emit(run, piece)

    def _finish(self, run: AnswerRun, end: Finish) -> None:
        self._timer.stop()
        if end.done is not None and self.request is not None:
            self.states.answered(run.chat, self.request, end.done.prompt_tokens + end.done.generated_tokens)
        self.changed.emit(run)
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
            self._do(run, run.fail(tr("The conversation could not be counted; send it again.")))

    def _on_token(self, event: Token) -> None:
        run = self.answer
        if run is not None and self.request is not None and event.request == self.request:
            run.token(event.text, event.choices)
            if not self._timer.isActive():
                self._timer.start()

    def _flush(self) -> None:
        if self.answer is not None:
            self._do(self.answer, self.answer.flush())

    def _on_done(self, event: Done) -> None:
        run = self.answer
        if run is not None and self.request is not None and event.request == self.request:
            self._do(run, run.done(event))

    def _on_loaded_changed(self, loaded: LoadedLayout | None) -> None:
        """End an answer that the model was not asked for yet: no request of it is lost with the model."""
        run = self.answer
        if loaded is None and run is not None and self.request is None and self._count is None:
            self._do(run, run.fail(tr("The model was unloaded.")))

    def _on_lost(self, lost: AnswerLost) -> None:
        run = self.answer
        if run is not None and lost.request in (self.request, self._count):
            self._do(run, run.fail(lost.sentence))
