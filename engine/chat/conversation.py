"""A conversation without its messages: title and folder for the list, and its settings."""

from __future__ import annotations

import msgspec

from engine.base.texts import escape, show
from engine.chat.message import Message

TITLE_CHARACTERS = 60


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation. Times are milliseconds since 1970 (UTC).

    `folder`: the name of its folder; empty: none.
    `leaf`: the id of the last shown message; None: there are no messages.
    `system`: its own system prompt; empty: that of the preset, if any.
    `preset`: the name of its preset; empty: none.
    `settings`: its own sampling settings, by the names of `SamplingSettings`.
    `template`: a chat template instead of the model's; empty: none.
    `tools`: definitions of the tools that the model may call, a JSON list as OpenAI has it; empty: none. It is kept
    as it was typed, with its faults.
    `draft`: text that was typed and not sent.
    `results`: typed results of calls that were not sent, by `result_key`.
    `forked_from`: the id of the conversation that it was branched from.
    `deleted_ms`: the time of its deletion, until it is purged.
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
    """Return the key of the typed result of a call; `message`: the id of the answer."""
    return f"{message}/{call}"


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """A match of a search.

    `message`: the id of the message; None: the match is in the title. `tree.select` shows its branch.
    `snippet`: text around the match, on one line.
    `begin`, `end`: place of the match in the snippet.
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
