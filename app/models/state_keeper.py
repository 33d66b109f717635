"""What a conversation asks of whoever keeps what models hold of conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class StateKeeper(Protocol):
    """Of one model. It waits for nothing; `chat` is the id of a conversation, `request` the number of an answer."""

    def before_answer(self, chat: str, then: Callable[[], None], *, goes_on: bool) -> None:
        """Call `then` once the model holds what is kept of a conversation, or has to read it.

        `goes_on`: whether something was said in it before.
        """

    def asked(self, chat: str, request: int) -> None:
        """An answer has begun."""

    def answered(self, chat: str, request: int, tokens: int) -> None:
        """An answer has ended, after which the model holds so many tokens of the conversation."""


class NoStates:
    """Keeps nothing: each conversation is read when it goes on."""

    def before_answer(self, chat: str, then: Callable[[], None], *, goes_on: bool) -> None:
        then()

    def asked(self, chat: str, request: int) -> None:
        pass

    def answered(self, chat: str, request: int, tokens: int) -> None:
        pass
