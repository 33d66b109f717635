"""A conversation with one loaded model: what was said, and the answer being written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from PySide6.QtCore import QObject, Signal

from app.models.loading import AnswerLost, Loading, ModelState
from engine.errors import EngineError
from engine.plan.preview import LoadedLayout
from engine.protocol.messages import ChatMessage, Generate
from engine.session.events import Done, Token


@dataclass(frozen=True, slots=True)
class ContextUse:
    """Tokens of the loaded context; `used` None when nothing was said yet."""

    used: int | None
    total: int | None


class Conversation(QObject):
    """Questions and answers over the child of a `Loading`; both live as long as the window."""

    answer_started = Signal(str)
    answer_text = Signal(str)
    answer_finished = Signal(Done)
    answer_failed = Signal(str)
    context_use_changed = Signal(ContextUse)
    cleared = Signal()

    def __init__(self, loading: Loading, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._loading = loading
        self._messages: list[ChatMessage] = []
        self._answer: list[str] = []
        self._request: int | None = None
        """The number of the answer that is being written."""
        self._discarded: int | None = None
        """That of one which ends and nobody wants to see."""
        self._used = False
        loading.bridge.token.connect(self._on_token)
        loading.answered.connect(self._on_answered)
        loading.answer_lost.connect(self._on_answer_lost)
        loading.loaded_changed.connect(self._on_loaded_changed)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was said since it began or was cleared."""
        return not self._used

    def send(self, text: str) -> None:
        """Answer `text` in the conversation so far."""
        loading = self._loading
        if loading.state is not ModelState.READY or loading.model is None:
            return
        self._used = True
        self._messages.append(ChatMessage(role="user", content=text))
        self._answer = []
        self.answer_started.emit(loading.model.name)
        try:
            self._request = loading.generate(Generate(messages=tuple(self._messages)))
        except EngineError as error:
            self._end_answer(error.summary())

    def clear(self) -> None:
        """Forget the conversation; a running answer ends first."""
        self._discarded, self._request = self._request, None
        self._loading.stop_answer()
        self._messages.clear()
        self._answer.clear()
        self._used = False
        self.cleared.emit()
        if self._loading.state is ModelState.READY:
            self.context_use_changed.emit(ContextUse(0, self._context_size))

    def restore(self, messages: tuple[tuple[Literal["user", "assistant"], str], ...]) -> None:
        """Go on with a conversation that had been cleared."""
        self._messages = [ChatMessage(role=role, content=text) for role, text in messages]
        self._used = True

    @property
    def _context_size(self) -> int | None:
        return self._loading.snapshot.context_size

    def _on_loaded_changed(self, loaded: LoadedLayout | None) -> None:
        used = None if loaded is None else 0
        self.context_use_changed.emit(ContextUse(used, None if loaded is None else self._context_size))

    def _on_token(self, event: Token) -> None:
        if self._request is None or event.request != self._request:
            return
        self._answer.append(event.text)
        self.answer_text.emit(event.text)

    def _on_answered(self, event: Done) -> None:
        if event.request == self._request:
            self._request = None
            self._keep_answer()
            self.answer_finished.emit(event)
            used = self._loading.snapshot.context_used or 0
            self.context_use_changed.emit(ContextUse(used, self._context_size))
        elif event.request == self._discarded:
            self.context_use_changed.emit(ContextUse(0, self._context_size))

    def _on_answer_lost(self, lost: AnswerLost) -> None:
        if lost.request == self._request:
            self._request = None
            self._end_answer(lost.sentence)

    def _end_answer(self, message: str) -> None:
        """Take the question back: what came of the answer stays on the screen, not in the conversation."""
        self._answer = []
        if self._messages and self._messages[-1].role == "user":
            self._messages.pop()
        self.answer_failed.emit(message)

    def _keep_answer(self) -> None:
        """Make the answer so far part of the conversation; a question without any answer is taken back."""
        text = "".join(self._answer)
        self._answer = []
        if text and self._messages:
            self._messages.append(ChatMessage(role="assistant", content=text))
        elif self._messages and self._messages[-1].role == "user":
            self._messages.pop()
