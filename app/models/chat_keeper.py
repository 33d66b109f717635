"""What a conversation asks of the place where it is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from engine.chats.conversation import Conversation as Chat
from engine.chats.message import Message
from engine.chats.tree import MessageTree

Then = Callable[[], None]
"""Called in the GUI thread once a change is on disk, or cannot be: what is painted survives the end of the process."""


class ChatKeeper(Protocol):
    """Takes changes in their order and waits for nothing."""

    def save(self, chat: Chat, before: Chat | None) -> None:
        """Keep a conversation: new where `before` is None, else what differs from that."""

    def apply(self, chat: str, before: MessageTree, after: MessageTree) -> None:
        """Keep what became of the messages of a conversation."""

    def keep_file(self, data: bytes) -> None:
        """Keep the bytes of an attachment, before the message that has it."""

    def read_files(self, names: Sequence[str], then: Callable[[Mapping[str, bytes]], None]) -> None:
        """Read attachments by their SHA-256; those that are not kept are left out."""

    def append(self, message: str, content: str, reasoning: str, then: Then) -> None:
        """Keep more text of an answer that is being written."""

    def finish(self, chat: str, message: Message, then: Then) -> None:
        """Keep an answer that is done."""


class NoKeeper:
    """Keeps nothing: for a window without a place for conversations."""

    def save(self, chat: Chat, before: Chat | None) -> None:
        pass

    def apply(self, chat: str, before: MessageTree, after: MessageTree) -> None:
        pass

    def keep_file(self, data: bytes) -> None:
        pass

    def read_files(self, names: Sequence[str], then: Callable[[Mapping[str, bytes]], None]) -> None:
        then({})

    def append(self, message: str, content: str, reasoning: str, then: Then) -> None:
        then()

    def finish(self, chat: str, message: Message, then: Then) -> None:
        then()
