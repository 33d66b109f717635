"""What the list of conversations shows, and what people do there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ListedChat:
    """A conversation in the list; `folder` empty: in none."""

    id: str
    title: str
    folder: str = ""
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class ListedHit:
    """A place that a search found; `message` empty: the title."""

    chat: str
    message: str
    title: str
    snippet: str


@dataclass(frozen=True, slots=True)
class ChatPlace:
    """Where to go: a conversation, and a message in it or none."""

    chat: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class ChatChange:
    """A new title or folder for a conversation."""

    chat: str
    text: str


def folders_of(chats: tuple[ListedChat, ...]) -> list[str]:
    """Return the names of folders, in the order in which they are listed."""
    return sorted({chat.folder for chat in chats if chat.folder}, key=str.casefold)
