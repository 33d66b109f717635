"""One answer under way: its text comes in pieces, is told apart from thinking, kept, and only then shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

from engine.chats.message import MAX_CHOICES, Message, MessageState, Timings
from engine.chats.store import ChatStore
from engine.chats.thinking import Marks, Splitter, Told
from engine.errors import EngineError
from engine.protocol.messages import TokenChoice


class AnswerInProgress:
    """Keeps one message that is in state `writing` in a kept tree. For one thread, but for `shown`.

    `shown` gets each piece when it is on disk, in the thread that writes, or why it could not be kept, once: the answer
    goes on, and is shown nevertheless. `begun` is what the model was given to go on from: it is in `message` already.
    """

    def __init__(
        self,
        store: ChatStore,
        conversation: str,
        message: Message,
        shown: Callable[[Told, EngineError | None], None],
        *,
        begun: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._conversation = store, conversation
        self._message, self._shown, self._clock = message, shown, clock
        self._splitter = Splitter()
        self._splitter.add(begun)
        self._has_thought = self._splitter.has_thought
        self._content, self._reasoning = [message.content], [message.reasoning]
        self._choices = list(message.choices)
        self._begun_s = clock()
        self._first_s: float | None = None
        self._thought_s: float | None = None
        self._lost = False

    @property
    def is_thinking(self) -> bool:
        """Whether the model thinks now."""
        return self._splitter.is_thinking

    @property
    def marks(self) -> Marks | None:
        """What the thought stands between; None where there was none."""
        return self._splitter.marks

    @property
    def message(self) -> Message:
        """The answer so far."""
        return msgspec.structs.replace(
            self._message, content="".join(self._content), reasoning="".join(self._reasoning)
        )

    def add(self, text: str, choices: Sequence[TokenChoice] = ()) -> None:
        """Take more of what the model writes, and how its tokens were chosen."""
        self._choices += choices[: max(0, MAX_CHOICES - len(self._choices))]
        if self._first_s is None:
            self._first_s = self._clock()
        self._keep(self._splitter.add(text))
        if self._splitter.has_thought and self._thought_s is None:
            self._thought_s = self._clock()

    def end(
        self, state: MessageState, *, stop_reason: str = "", timings: Timings | None = None, note: str = ""
    ) -> tuple[Message, Future[None]]:
        """End the answer; returns it whole, and what is done when it is on disk so."""
        self._keep(self._splitter.rest())
        now_s = self._clock()
        if self._splitter.marks is not None and self._thought_s is None:
            self._thought_s = now_s
        timings = msgspec.structs.replace(
            timings or Timings(),
            first_token_seconds=None if self._first_s is None else self._first_s - self._begun_s,
            thinking_seconds=None
            if self._thought_s is None or self._first_s is None or self._has_thought
            else self._thought_s - self._first_s,
        ).after(self._message.timings)
        whole = msgspec.structs.replace(
            self.message,
            state=state,
            stop_reason=stop_reason,
            timings=timings,
            note=note,
            choices=tuple(self._choices),
        )
        return whole, self._store.finish(self._conversation, whole)

    def _keep(self, told: Told) -> None:
        if not told.reasoning and not told.content:
            return
        self._reasoning.append(told.reasoning)
        self._content.append(told.content)
        kept = self._store.append(self._message.id, told.content, told.reasoning)
        kept.add_done_callback(lambda done: self._on_kept(told, done))

    def _on_kept(self, told: Told, done: Future[None]) -> None:
        error = done.exception()
        first = error is not None and not self._lost
        self._lost = self._lost or error is not None
        self._shown(told, error if first and isinstance(error, EngineError) else None)
