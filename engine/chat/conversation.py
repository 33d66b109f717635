"""A conversation without its messages: what a list of them shows, and what is set for all of it."""

from __future__ import annotations

import msgspec

from engine.base.texts import escape, show
from engine.chat.message import Message

TITLE_CHARACTERS = 60


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Times in milliseconds since 1970 (UTC).

    `folder`: a name, empty: in none; `leaf`: the last message of what is shown, None: nothing was said; `system`: the
    system prompt; `preset`: a name, empty for none; `settings`: what the chat sets itself, by the names of
    `SamplingSettings`; `template`: a chat template in place of the model's, empty for that one; `draft`: what is typed
    and not sent; `forked_from`: the conversation that it was branched off; `deleted_ms`: when it was deleted, until it
    is purged.
    """

    id: str
    title: str = ""
    folder: str = ""
    pinned: bool = False
    leaf: str | None = None
    system: str = ""
    preset: str = ""
    settings: dict[str, object] = {}
    template: str = ""
    draft: str = ""
    forked_from: str | None = None
    created_ms: int = 0
    updated_ms: int = 0
    deleted_ms: int | None = None


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """A place that a search found: `tree.select(hit.message)` shows its branch. `message` None: it is in the title.

    `snippet` is text around it in one line; `begin` and `end` are where in the snippet the words are.
    """

    conversation: str
    title: str
    message: str | None
    snippet: str
    begin: int
    end: int
    created_ms: int


def title_of(text: str) -> str:
    """Return a title for a conversation that begins with `text`: its first line, without control characters."""
    line = escape(" ".join(text.strip().split("\n", 1)[0].split()))
    return line if len(line) <= TITLE_CHARACTERS else f"{line[: TITLE_CHARACTERS - 1].rstrip()}…"


def title_of_message(message: Message) -> str:
    """Return a title for a conversation that begins with `message`: from its text, else the name of its first file."""
    return title_of(message.content) or next((show(each.name) for each in message.attachments), "")
