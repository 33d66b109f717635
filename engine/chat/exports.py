"""Conversations as documents: Markdown and HTML of what is shown, our JSON with all branches."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from engine.base.texts import one_line
from engine.chat.conversation import Conversation
from engine.chat.message import Attachment, Message
from engine.chat.tree import MessageTree
from engine.runtime.media.images.pictures import FORMATS

VERSION = 1
FORMAT = "layerdeck-conversations"
IMAGE_TYPES = frozenset(FORMATS.values())
_NAMES = {"system": "System", "user": "You", "assistant": "Answer", "tool": "Tool"}
_STYLE = (
    "body{font-family:sans-serif;max-width:46em;margin:2em auto;padding:0 1em;line-height:1.5}"
    "section{margin:1.2em 0}h2{font-size:1em;color:#666}pre{white-space:pre-wrap;overflow-wrap:anywhere;font:inherit}"
    "details pre{color:#666}"
)


def as_markdown(
    conversation: Conversation, messages: Sequence[Message], files: Mapping[str, bytes] | None = None
) -> str:
    """Return messages as Markdown: what models wrote is Markdown already and stays as it is.

    `files`: bytes of attachments by their SHA-256; images among them stand in the text.
    """
    parts = [f"# {one_line(conversation.title) or 'Conversation'}\n"]
    if conversation.system:
        parts.append(f"## System\n\n{conversation.system}\n")
    for message in messages:
        parts.append(f"## {_heading(message)}\n")
        for attachment in message.attachments:
            name, address = one_line(attachment.name), data_address(attachment, files)
            parts.append(f"![{_bracketed(name)}]({address})\n" if address else f"Attached: {name}\n")
        if message.reasoning:
            parts.append("\n".join(f"> {line}".rstrip() for line in message.reasoning.splitlines()) + "\n")
        parts.append(f"{message.content}\n")
    return "\n".join(parts)


def as_html(conversation: Conversation, messages: Sequence[Message], files: Mapping[str, bytes] | None = None) -> str:
    """Return messages as one page that needs nothing else and runs nothing: all text in it is escaped.

    `files` as of `as_markdown`.
    """
    title = html.escape(one_line(conversation.title) or "Conversation")
    parts = [
        '<!DOCTYPE html>\n<html><head><meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:;'
        " style-src 'unsafe-inline'\">",
        f"<title>{title}</title><style>{_STYLE}</style></head><body>\n<h1>{title}</h1>\n",
    ]
    if conversation.system:
        parts.append(f"<section><h2>System</h2><pre>{_escaped(conversation.system)}</pre></section>\n")
    for message in messages:
        parts.append(f"<section><h2>{html.escape(_heading(message))}</h2>")
        for attachment in message.attachments:
            name, address = _escaped(one_line(attachment.name)), data_address(attachment, files)
            parts.append(f'<p><img src="{address}" alt="{name}"></p>' if address else f"<p>Attached: {name}</p>")
        if message.reasoning:
            parts.append(f"<details><summary>Thinking</summary><pre>{_escaped(message.reasoning)}</pre></details>")
        parts.append(f"<pre>{_escaped(message.content)}</pre></section>\n")
    return "".join(parts) + "</body></html>\n"


def as_json(
    conversations: Sequence[tuple[Conversation, MessageTree]], files: Mapping[str, bytes] | None = None
) -> bytes:
    """Return conversations with all branches as our own document; `files`: bytes of attachments by their SHA-256."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "conversations": [
            {
                "conversation": msgspec.to_builtins(conversation),
                "messages": [msgspec.to_builtins(message) for message in tree.messages.values()],
                "leaf": tree.leaf,
            }
            for conversation, tree in conversations
        ],
        "files": {name: base64.b64encode(data).decode() for name, data in (files or {}).items()},
    }
    return (json.dumps(document, ensure_ascii=False, indent=1) + "\n").encode("utf-8", "replace")


def data_address(attachment: Attachment, files: Mapping[str, bytes] | None) -> str:
    """Return an image as an address that holds all of it; empty for other files, and where its bytes are not there."""
    data = (files or {}).get(attachment.sha256)
    if attachment.kind != "image" or attachment.mime not in IMAGE_TYPES or data is None:
        return ""
    return f"data:{attachment.mime};base64,{base64.b64encode(data).decode()}"


def _bracketed(text: str) -> str:
    return text.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")


def _heading(message: Message) -> str:
    words = [_NAMES[message.role]]
    if message.model:
        words.append(f"({one_line(message.model)})")
    if message.created_ms:
        words.append(_time(message.created_ms))
    return " ".join(words)


def _time(time_ms: int) -> str:
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return ""


def _escaped(text: str) -> str:
    """Escape for HTML; characters that HTML has no place for become marks."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for letter in html.escape(text)
    )
