"""An answer under way as a value that grows: what it was asked with, and what came of it so far."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from app.models.context_fit import ContextQuestion
from engine.chats.context import left_out_sentence
from engine.chats.message import MAX_CHOICES, Message, MessageState, Timings
from engine.chats.thinking import Splitter, Told
from engine.chats.tree import MessageTree, changed
from engine.protocol.messages import Counted, TokenChoice
from engine.session.events import Done
from engine.settings.sampling_settings import SamplingSettings


@dataclass(frozen=True, slots=True)
class Piece:
    """More of an answer, which is kept and may be painted."""

    message: str
    text: str
    thinking: str = ""


@dataclass(slots=True)
class Answer:
    """An answer under way: the conversation that it is of, as that stands, and what came of it.

    `system`, `template` and `settings` are those of when it was asked for: another conversation may be shown since.
    """

    chat: str
    tree: MessageTree
    message: Message
    system: str
    template: str
    settings: SamplingSettings
    left_out: frozenset[str]
    """Messages that the model is not shown any more."""
    was_cut: bool
    """Whether some were left out for the answer before already."""
    begun: str = ""
    """What it goes on from."""
    counting: tuple[int, ContextQuestion] | None = None
    """The number under which the model counts what it would read, before it is asked."""
    asking: tuple[ContextQuestion, Counted] | None = None
    """What a person is asked about: the context is full."""
    waits: bool = False
    """Whether the model does not yet hold what is kept of the conversation."""
    request: int | None = None
    splitter: Splitter = field(default_factory=Splitter)
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    choices: list[TokenChoice] = field(default_factory=list)
    """How its tokens were chosen, the first `MAX_CHOICES`."""
    waiting: list[Told] = field(default_factory=list)
    """What was told and is not kept yet."""
    taken: int = 0
    """Pieces that came, each of which is a token; some hold another one that is no text by itself."""
    asked_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    last_s: float | None = None
    thought_s: float | None = None
    """When the answer itself began, where there was a thought before."""
    has_thought: bool = False
    """Whether the thought was at its end in what it goes on from."""
    goes_on: bool = False
    """It was stopped only to answer now: what it thought so far is enough."""

    def __post_init__(self) -> None:
        """Begin with what is there: the words of an answer that goes on."""
        self.splitter.add(self.begun)
        self.has_thought = self.splitter.has_thought
        self.content.append(self.message.content)
        self.reasoning.append(self.message.reasoning)
        self.choices += self.message.choices

    @property
    def question(self) -> Message | None:
        """What it answers."""
        return self.tree.messages.get(self.message.parent or "")

    @property
    def note(self) -> str:
        """What a person is told of it: that turns are left out, where that begins with it."""
        return left_out_sentence() if self.message.cut is not None and not self.was_cut else ""

    @property
    def has_words(self) -> bool:
        """Whether anything came of it."""
        return any(self.content) or any(self.reasoning)

    def is_of(self, request: int | None) -> bool:
        """Say whether the model was asked for it under this number."""
        return self.request is not None and request == self.request

    def take(self, text: str, choices: Sequence[TokenChoice] = ()) -> None:
        """Tell thought and answer apart; what there is to show of it waits to be kept."""
        self.choices += choices[: max(0, MAX_CHOICES - len(self.choices))]
        self.taken += 1
        self.last_s = time.monotonic()
        if self.first_s is None:
            self.first_s = self.last_s
        told = self.splitter.add(text)
        self._note(told)
        if told.content or told.reasoning:
            self.waiting.append(told)

    def rest(self) -> None:
        """Take what was held back at the end of the text."""
        self._note(self.splitter.rest())

    def next_piece(self) -> Piece:
        """Return what waits to be kept, and wait for more."""
        text = "".join(told.content for told in self.waiting)
        thinking = "".join(told.reasoning for told in self.waiting)
        self.waiting.clear()
        return Piece(self.message.id, text, thinking)

    def add(self, piece: Piece) -> None:
        """Take a piece that is kept into the message."""
        message = self.tree.messages[piece.message]
        content, reasoning = message.content + piece.text, message.reasoning + piece.thinking
        self.put(msgspec.structs.replace(message, content=content, reasoning=reasoning))

    def put(self, message: Message) -> None:
        """Have the message be this one."""
        self.message = message
        self.tree = changed(self.tree, message)

    def end(
        self, state: MessageState, *, note: str = "", stop_reason: str = "", timings: Timings | None = None
    ) -> None:
        """Have the message hold all that came."""
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        self.put(
            msgspec.structs.replace(
                self.message,
                content=content,
                reasoning=reasoning,
                state=state,
                note=note,
                stop_reason=stop_reason,
                timings=timings or self.message.timings,
                choices=tuple(self.choices),
            )
        )

    def timings(self, event: Done) -> Timings:
        """Return how long all of it took, by the model's own account and by ours."""
        return Timings(
            prompt_tokens=event.prompt_tokens,
            cached_tokens=event.cached_tokens,
            generated_tokens=event.generated_tokens,
            prompt_seconds=_seconds(event.prompt_tokens - event.cached_tokens, event.prompt_tokens_per_second),
            generation_seconds=_seconds(event.generated_tokens, event.generation_tokens_per_second),
            first_token_seconds=_between(self.asked_s, self.first_s),
            thinking_seconds=self._thinking_seconds(),
        ).after(self.message.timings)

    def timings_so_far(self) -> Timings | None:
        """Return what it took by our own count, where the model cannot tell any more; None: nothing came."""
        if not self.taken:
            return None
        return Timings(
            generated_tokens=self.taken,
            generation_seconds=_between(self.first_s, self.last_s),
            first_token_seconds=_between(self.asked_s, self.first_s),
            thinking_seconds=self._thinking_seconds(),
        ).after(self.message.timings)

    def _thinking_seconds(self) -> float | None:
        """Return how long was thought since it was asked for, also where the thought did not come to its end."""
        if self.has_thought:
            return None
        return _between(self.first_s, time.monotonic() if self.splitter.is_thinking else self.thought_s)

    def _note(self, told: Told) -> None:
        self.reasoning.append(told.reasoning)
        self.content.append(told.content)
        if self.splitter.has_thought and self.thought_s is None:
            self.thought_s = time.monotonic()


def _seconds(tokens: int, per_second: float) -> float | None:
    return tokens / per_second if per_second else None


def _between(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else end_s - begin_s
