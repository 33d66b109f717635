"""Messages of conversations with attachments and timings. Times in `..._ms` are milliseconds since 1970 (UTC)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from engine.base.values import replace
from engine.runtime.protocol.messages import DraftStatistics, TokenChoice
from engine.runtime.protocol.requests import ToolCall

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
MessageState = Literal["done", "writing", "stopped", "interrupted", "failed"]
"""State of a message; its text so far is kept in each state.

`done`: complete. `writing`: more text is to come. `stopped`: a person stopped the answer. `interrupted`: the program or
the model's process ended during the answer. `failed`: the answer ended with the error in `note`.
"""
MAX_CHOICES = 2048
"""Largest number of a message's tokens that are stored with probabilities (`Message.choices`); each takes some hundred
bytes.
"""
AttachmentKind = Literal["text", "pdf", "image", "audio"]


def new_id() -> str:
    """Return a random id of 80 bits for a conversation, a message or an attachment."""
    # Random, because window and command line write to one database at the same time.
    return secrets.token_hex(10)


def now_ms() -> int:
    """Return the time in milliseconds since 1970 (UTC)."""
    return time.time_ns() // 1_000_000


class Timings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts and times of an answer. A time is None if it is unknown.

    `cached_tokens`: number of prompt tokens that were in the KV cache.
    `thinking_tokens`: number of generated tokens of the thought.
    `first_token_seconds`: time from the request to the first token.
    `draft`: statistics of speculative decoding; those since the last continuation if the answer was continued. None if
    nothing was drafted.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    thinking_tokens: int = 0
    prompt_seconds: float | None = None
    first_token_seconds: float | None = None
    generation_seconds: float | None = None
    thinking_seconds: float | None = None
    draft: DraftStatistics | None = None

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """Processed prompt tokens per second, without the tokens that were in the KV cache; None: unknown."""
        return _speed(self.prompt_tokens - self.cached_tokens, self.prompt_seconds)

    @property
    def generation_tokens_per_second(self) -> float | None:
        return _speed(self.generated_tokens, self.generation_seconds)

    def after(self, earlier: Timings | None) -> Timings:
        """Return the timings of a whole answer that was continued. This object has the timings of the continuation.

        Values of the prompt are taken from `earlier`. Generated tokens and their times are added up.

        `earlier`: timings of the answer before it was continued; None: it was not continued.
        """
        if earlier is None:
            return self
        first = earlier.first_token_seconds
        return replace(
            earlier,
            generated_tokens=earlier.generated_tokens + self.generated_tokens,
            thinking_tokens=earlier.thinking_tokens + self.thinking_tokens,
            first_token_seconds=self.first_token_seconds if first is None else first,
            generation_seconds=_together(earlier.generation_seconds, self.generation_seconds),
            thinking_seconds=_together(earlier.thinking_seconds, self.thinking_seconds),
            draft=self.draft,
        )


class Attachment(Struct, frozen=True, kw_only=True):
    """A file attached to a message.

    `sha256`: key of its bytes in the database.
    `text`: its text for the model; empty for images and sounds.
    `width_px`, `height_px`: size of an image as the model sees it; 0 for other files.
    `length_ms`: length of a sound; 0 for other files.
    """

    id: str
    kind: AttachmentKind
    name: str
    mime: str
    sha256: str
    size_bytes: int
    text: str = ""
    width_px: int = 0
    height_px: int = 0
    length_ms: int = 0


class Cut(Struct, frozen=True):
    """The turns that were left out of a prompt because the context was full.

    `first`: id of the first message after the left-out turns. All turns before this message are left out, except pinned
    ones.
    `n_ctx`: size of the context in tokens.
    """

    first: str
    n_ctx: int


class Message(Struct, frozen=True, kw_only=True):
    """A message of a conversation. Messages with the same parent are versions of each other.

    `parent`: id of the message before it; None: a first message.
    `pinned`: whether its turn stays in the prompt when old turns are dropped.
    `call_id`: id of the tool call that a message of the role "tool" answers; else empty.

    The other fields are used by answers:
    `reasoning`: the thought before `content`.
    `model`, `model_identity`: name of the model, and a digest that identifies it.
    `layout`: devices with their layers, as text.
    `settings`: sampling settings that differ from the defaults, by the names of `SamplingSettings`.
    `stop_reason`: why generation ended, as in the engine's `Done` event.
    `note`: a sentence on an error or on dropped turns.
    `choices`: its first tokens (thought included) with their probabilities and the most probable tokens, if requested;
    at most `MAX_CHOICES`.
    `cut`: the turns that were left out of the answer's prompt; None if there were none.
    `calls`: tool calls that the model wrote after `content`.
    """

    id: str
    role: Role
    content: str
    parent: str | None = None
    reasoning: str = ""
    model: str = ""
    model_identity: str = ""
    layout: str = ""
    settings: dict[str, object] = {}
    timings: Timings | None = None
    stop_reason: str = ""
    state: MessageState = "done"
    note: str = ""
    pinned: bool = False
    attachments: tuple[Attachment, ...] = ()
    created_ms: int = 0
    choices: tuple[TokenChoice, ...] = ()
    cut: Cut | None = None
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""


def _speed(tokens: int, seconds: float | None) -> float | None:
    return tokens / seconds if seconds else None


def _together(earlier: float | None, later: float | None) -> float | None:
    return later if earlier is None else earlier + (later or 0.0)


def new_user_message(text: str, parent: str | None, attachments: Sequence[Attachment] = ()) -> Message:
    """Return a message of the role "user".

    `text`: the typed question.
    `parent`: id of the message before it; None for a first message.
    """
    return Message(
        id=new_id(), role="user", content=text, parent=parent, attachments=tuple(attachments), created_ms=now_ms()
    )
