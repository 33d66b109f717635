"""A conversation without its messages: its title and folder, and its settings."""

from __future__ import annotations

from msgspec import Struct

from engine.base.texts import escape, show
from engine.chat.message import Message

TITLE_CHARACTERS = 60


class Conversation(Struct, frozen=True, kw_only=True):
    """A conversation without its messages. Times are milliseconds since 1970 (UTC).

    `folder`: name of its folder in the list; empty if it is in no folder.
    `leaf`: id of the last shown message; None if there are no messages.
    `system`: its own system prompt; empty for the prompt of the preset, if any.
    `preset`: name of its preset; empty if it has none.
    `settings`: its own sampling settings, by the names of `SamplingSettings`.
    `template`: its own chat template; empty for the model's.
    `tools`: definitions of the tools that the model may call, as an OpenAI JSON list; empty for no tools. The text is
    stored as typed, even with errors.
    `draft`: typed text that was not sent.
    `results`: typed tool results that were not sent, by `result_key`.
    `forked_from`: id of the conversation from which it was branched; None if it was not branched.
    `deleted_ms`: time of its deletion, until it is purged; None if it is not deleted.
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
    tools: str = ""
    draft: str = ""
    results: dict[str, str] = {}
    forked_from: str | None = None
    created_ms: int = 0
    updated_ms: int = 0
    deleted_ms: int | None = None


def result_key(message: str, call: str) -> str:
    """Return the key in `Conversation.results` of a tool result that the user typed.

    `message`: id of the answer. `call`: id of the call.
    """
    return f"{message}/{call}"


class Hit(Struct, frozen=True, kw_only=True):
    """A match of a text search in the conversations.

    `conversation`, `title`: id and title of the conversation.
    `message`: id of the message; None: the match is in the title. `tree.select` shows the branch of a message.
    `snippet`: text around the match, on one line.
    `begin`, `end`: character range of the match in the snippet; empty if its place is not known.
    `created_ms`: time of the message or, for a title, of the conversation's last change.
    """

    conversation: str
    title: str
    message: str | None
    snippet: str
    begin: int
    end: int
    created_ms: int


def title_of(text: str) -> str:
    """Return a title from the first line of `text`, shortened and without control characters."""
    line = escape(" ".join(text.strip().split("\n", 1)[0].split()))
    return line if len(line) <= TITLE_CHARACTERS else f"{line[: TITLE_CHARACTERS - 1].rstrip()}…"


def title_of_message(message: Message) -> str:
    """Return a title for a conversation that begins with `message`, from its text or else its first
    attachment's name.
    """
    return title_of(message.content) or next((show(each.name) for each in message.attachments), "")
