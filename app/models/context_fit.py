"""What of a conversation a model is shown when it may not fit: counted by the model itself, whole turns left out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.chats.asking import chat_messages, media_of, message_text
from engine.chats.context import Fit, Overflow, answer_reserve, choose
from engine.chats.message import Message
from engine.protocol.messages import ChatMessage, Counted, CountTokens

COUNT_FROM = 0.5
"""Nothing is counted while there are fewer characters than this part of the context has tokens."""


def may_be_too_long(asked: Sequence[ChatMessage], n_ctx: int | None) -> bool:
    """Return whether it is worth asking the model how many tokens these are; nobody knows that of images and sounds."""
    if any(message.media for message in asked):
        return True
    return n_ctx is not None and sum(len(message.content) for message in asked) > n_ctx * COUNT_FROM


def shown_path(path: Sequence[Message], left_out: Collection[str]) -> tuple[Message, ...]:
    """Return a path without what is left out."""
    return tuple(message for message in path if message.id not in left_out)


@dataclass(frozen=True, slots=True)
class ContextQuestion:
    """A path to be counted before it is asked."""

    system: str
    path: tuple[Message, ...]
    left_out: frozenset[str]
    template: str = ""

    @property
    def request(self) -> CountTokens:
        """What the model is asked."""
        shown = shown_path(self.path, self.left_out)
        messages = chat_messages(self.system, shown)
        media = tuple(file for message in shown for file in media_of(message))
        texts = tuple(map(message_text, shown))
        return CountTokens(messages=messages, texts=texts, template=self.template, media=media)

    def fit(self, counted: Counted, policy: Overflow, max_tokens: int | None) -> Fit:
        """Return what is shown."""
        shown = shown_path(self.path, self.left_out)
        of_media = iter(counted.media)
        tokens = {
            message.id: count + sum(next(of_media) for _ in media_of(message))
            for message, count in zip(shown, counted.texts, strict=True)
        }
        # What the template writes, and the system prompt, are there whatever is left out.
        around = max(0, counted.prompt - sum(tokens.values()))
        room = counted.n_ctx - answer_reserve(counted.n_ctx, max_tokens) - around
        return choose(self.path, tokens, room, policy, self.left_out)
