"""Messages of conversations and what belongs to them, as values. Times are milliseconds since 1970 (UTC)."""

from __future__ import annotations

import secrets
import time
from typing import Literal

import msgspec

from engine.runtime.protocol.messages import TokenChoice

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
MessageState = Literal["done", "writing", "stopped", "interrupted", "failed"]
"""`writing`: an answer under way; `stopped` by a person; `interrupted`: the program or the model's process ended in the
middle of it; `failed`: with an error, which is in `note`. Content so far is kept in each case."""
MAX_CHOICES = 2048
"""Tokens of a message whose alternatives are kept: some hundred bytes each."""
AttachmentKind = Literal["text", "pdf", "image", "audio"]


def new_id() -> str:
    """Return a name for a conversation, a message or an attachment that no other has, on any machine."""
    return secrets.token_hex(10)


def now_ms() -> int:
    """Return the time."""
    return time.time_ns() // 1_000_000


class Timings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer took. `cached_tokens` of the prompt were not read again; times in seconds, None: not known."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    thinking_tokens: int = 0
    prompt_seconds: float | None = None
    first_token_seconds: float | None = None
    generation_seconds: float | None = None
    thinking_seconds: float | None = None

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """How fast what was not cached was read."""
        return _speed(self.prompt_tokens - self.cached_tokens, self.prompt_seconds)

    @property
    def generation_tokens_per_second(self) -> float | None:
        return _speed(self.generated_tokens, self.generation_seconds)

    def after(self, earlier: Timings | None) -> Timings:
        """Return what an answer took that goes on from one that took `earlier`: its prompt is that of the earlier."""
        if earlier is None:
            return self
        first = earlier.first_token_seconds
        return msgspec.structs.replace(
            earlier,
            generated_tokens=earlier.generated_tokens + self.generated_tokens,
            thinking_tokens=earlier.thinking_tokens + self.thinking_tokens,
            first_token_seconds=self.first_token_seconds if first is None else first,
            generation_seconds=_together(earlier.generation_seconds, self.generation_seconds),
            thinking_seconds=_together(earlier.thinking_seconds, self.thinking_seconds),
        )


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """A file with a message. Its bytes are kept beside, by `sha256`; `text` is what of it a model reads as text.

    `width_px` and `height_px` of an image, as a model sees it, `length_ms` of a sound; 0 of other files.
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


class Cut(msgspec.Struct, frozen=True):
    """What is left out of a full context of `n_ctx` tokens: all before the message `first`, but for pinned turns."""

    first: str
    n_ctx: int


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message; a conversation begins with one whose `parent` is None. Those with the same parent are versions.

    Of an answer: `reasoning` is what was thought before `content`; `model` its name and `model_identity` what tells it
    from others; `layout` in words where its layers were; `settings` what was asked for that is not a default, by the
    names of `SamplingSettings`; `stop_reason` as in events; `note` a sentence on what went wrong, or what was left out.
    `choices`: how its first tokens were chosen, thought first, where that was asked for; at most `MAX_CHOICES`.
    `cut`: what the model was not shown of what comes before it; None: it was shown all of it.
    `pinned`: it stays in the context when old turns are dropped.
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


def _speed(tokens: int, seconds: float | None) -> float | None:
    return tokens / seconds if seconds else None


def _together(earlier: float | None, later: float | None) -> float | None:
    return later if earlier is None else earlier + (later or 0.0)
