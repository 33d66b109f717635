"""Carries out answers of one model in the window: the driver of the state machine `engine.chat.answer`.

The state machine decides what to do next and returns effects, such as "store this text". `Answering` carries out the
effects without blocking, and passes events of the model and of the storage to the state machine. An answer does not
depend on which conversation is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from PySide6.QtCore import QObject, Signal

from app.models.loading import Loading, RequestLost
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
from widgets.common.delayed_call import DelayedCall

KEEP_INTERVAL_MS = 30
"""Milliseconds for which new text is collected, then stored and painted together."""

Then = Callable[[], None]
"""Callback in the GUI thread after a change was written to disk, or after the write has failed.
Text of an answer is painted only in this callback: so a crash loses no text that was visible."""


class ChatStorage:
    """Interface of a storage for conversations. Calls do not block; changes are written in the order of the calls.

    This base class stores nothing.
    """

    def save(self, chat: Chat, before: Chat | None) -> None:
        """Store the conversation `chat`. `before`: its last stored version; None if it is new."""

    def apply(self, chat: str, before: MessageTree, after: MessageTree) -> None:
        """Store how the messages of conversation `chat` have changed. `before`, `after`: all its messages."""

    def keep_file(self, data: bytes) -> None:
        """Store the bytes of an attachment. Called before the message that refers to it is stored."""

    def read_files(self, names: Sequence[str], then: Callable[[Mapping[str, bytes]], None]) -> None:
        """Read attachments, then call `then` with a mapping from SHA-256 to bytes, for those that are stored.

        `names`: SHA-256 of each attachment to read.
        """
        then({})

    def append(self, piece: Append, then: Then) -> None:
        """Append the text of `piece` to the stored answer that is being written, then call `then`."""
        then()

    def finish(self, chat: str, message: Message, then: Then) -> None:
        """Store the complete answer `message`, which has ended, in conversation `chat`; then call `then`."""
        then()


class StateStorage:
    """Interface for saving and restoring the KV cache of one model's conversations. Calls do not block.

    `chat`: id of a conversation. `request`: number of the request for an answer. This base class saves nothing, so that
    the model has to read each conversation again.
    """

    def before_answer(self, chat: str, then: Callable[[], None], *, goes_on: bool) -> None:
        """Restore the saved KV state of a conversation if there is one, then call `then`.

        `goes_on`: whether the conversation has earlier messages.
        """
        then()

    def asked(self, chat: str, request: int) -> None:
        """Record that the model begins an answer in conversation `chat`.

        The answer adds tokens to the conversation's KV cache, so the KV state before the answer can no longer be saved.
        """

    def answered(self, chat: str, request: int, tokens: int) -> None:
        """Record that an answer in conversation `chat` has ended, so that the KV state can be saved.

        `tokens`: length of the conversation in the KV cache; 0 if the cached tokens cannot be reused.
        """


class Answering(QObject):
    """Generates the answers of one model, one at a time, and emits their text. Use it in the GUI thread only.

    `storage`: stores the messages. `states`: saves and restores KV states. The default objects store nothing.
    """

    begun = Signal()
    changed = Signal(AnswerRun)
    """Carries an answer whose message has changed."""
    written = Signal(AnswerRun, Append)
    """Carries an answer and a piece of its text, which is on disk and may now be painted."""
    overflow_asked = Signal(str)
    """Carries the question to the user what to do with a full context; `answer_overflow` takes the choice.
    An empty text removes the question."""
    notice_given = Signal(AnswerRun, str)
    """Carries a sentence for people about the answer that is being written."""
    finished = Signal(AnswerRun, Finish)
    kept = Signal(str)
    """Carries the id of an answer that is stored completely."""

    def __init__(self, loading: Loading, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._loading = loading
        self.storage = ChatStorage()
        self.states = StateStorage()
        self.overflow: Overflow = "drop"
        """What to do if the context is full: drop the oldest turns, ask the user, or refuse the question."""
        self.answer: AnswerRun | None = None
        """The answer that is being written; None if there is none."""
        self.request: int | None = None
        """The number of the request for the present answer; None before the request is sent to the model."""
        self._count: int | None = None
        """The number of the request that counts the tokens of the prompt; None if no such request runs."""
        self._timer = DelayedCall(self, self._flush, KEEP_INTERVAL_MS)
        loading.bridge.token.connect(self._on_token)
        loading.bridge.shifted.connect(self._on_shifted)
        loading.answered.connect(self._on_done)
        loading.bridge.answered.connect(self._on_counted)
        loading.request_lost.connect(self._on_lost)
        loading.loaded_changed.connect(self._on_loaded_changed)

    # ------------------------------------------------------------------ what people do

    def begin(self, run: AnswerRun) -> None:
        """Make `run` the current answer and start it, for example by sending its request to the model."""
        self.answer, self.request, self._count = run, None, None
        self._loading.set_question(True)
        self.begun.emit()
        self._do(run, run.begin())

    def stop(self) -> None:
        """Stop the answer. Its text so far remains in the conversation."""
        run = self.answer
        if run is None:
            self._loading.stop_answer()
            return
        self._do(run, run.stop())

    def answer_overflow(self, leave_out: bool) -> None:
        """Continue after the question about a full context.

        `leave_out`: drop the oldest turns and send the user's message; if false, the message is not sent.
        """
        if self.answer is not None:
            self._do(self.answer, self.answer.answer_overflow(leave_out))

    def answer_now(self) -> None:
        """Stop the model's thinking, and make it write its answer after the unfinished thought."""
        if self.answer is not None:
            self._do(self.answer, self.answer.answer_now())

    # ------------------------------------------------------------------ effects

    def _do(self, run: AnswerRun, effects: core.Effects) -> None:
        """Carry out `effects`, actions that the state machine has chosen for the answer `run`.

        If another answer is the present one by now, the effects are dropped.
        """
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
            case core.SendRequest():
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
        """Emit `written` with `piece`, a text of the answer `run`. Called when the text has been stored.

        If the answer has ended meanwhile, nothing is emitted, because the complete answer is shown.
        """
        if run is self.answer and not run.has_ended:
            run.written(piece)
            # First the piece: a receiver of `changed` may show the whole text, to which it must not be added again.
            self.written.emit(run, piece)
            self.changed.emit(run)

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
        self._loading.set_question(False)
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
            self._timer.begin()

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
        """End the answer with an error if the model was unloaded before a request was sent.

        After a request was sent, the signal `Loading.request_lost` reports the loss instead.
        """
        run = self.answer
        # An answer that waits for a restored state or a count of tokens has no event that would end it.
        if loaded is None and run is not None and self.request is None and self._count is None:
            self._do(run, run.fail(tr("The model was unloaded.")))

    def _on_lost(self, lost: RequestLost) -> None:
        run = self.answer
        if run is not None and lost.request in (self.request, self._count):
            self._do(run, run.fail(lost.sentence))
