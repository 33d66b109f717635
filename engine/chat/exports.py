"""Exports conversations: the shown branch as a web page or OpenAI's messages, or all branches as Layerdeck's JSON."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

import msgspec

from engine.base.texts import fenced, one_line, replace_controls
from engine.chat.asking import message_text
from engine.chat.conversation import Conversation
from engine.chat.message import Attachment, Message
from engine.chat.tools import pretty_arguments, read_tools
from engine.chat.tree import MessageTree
from engine.runtime.media.images.pictures import FORMATS
from engine.runtime.protocol.requests import ToolCall

VERSION = 1
FORMAT = "layerdeck-conversations"
IMAGE_TYPES = frozenset(FORMATS.values())
_NAMES = {"system": "System", "user": "You", "assistant": "Answer", "tool": "Tool"}
_STYLE = (
    "body{font-family:sans-serif;max-width:46em;margin:2em auto;padding:0 1em;line-height:1.5}"
    "section{margin:1.2em 0}h2{font-size:1em;color:#666}pre{white-space:pre-wrap;overflow-wrap:anywhere;font:inherit}"
    "details pre{color:#666}"
)


def as_html(conversation: Conversation, messages: Sequence[Message], files: Mapping[str, bytes] | None = None) -> str:
    """Return messages as one HTML page. It has no external resources and no scripts, and all text is escaped.

    `files`: bytes of attachments by SHA-256. Images among them are embedded in the page.
    """
    title = html.escape(one_line(conversation.title) or "Conversation")
    parts = [
        '<!DOCTYPE html>\n<html><head><meta charset="utf-8">',
        # A policy against scripts and requests, in case that escaping ever fails.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:;'
        " style-src 'unsafe-inline'\">",
        f"<title>{title}</title><style>{_STYLE}</style></head><body>\n<h1>{title}</h1>\n",
    ]
    if conversation.system:
        parts.append(f"<section><h2>System</h2><pre>{_escaped(conversation.system)}</pre></section>\n")
    for message in messages:
        parts.append(f"<section><h2>{html.escape(heading(message))}</h2>")
        for attachment in message.attachments:
            name, address = _escaped(one_line(attachment.name)), data_address(attachment, files)
            parts.append(f'<p><img src="{address}" alt="{name}"></p>' if address else f"<p>Attached: {name}</p>")
        if message.reasoning:
            parts.append(f"<details><summary>Thinking</summary><pre>{_escaped(message.reasoning)}</pre></details>")
        parts.append(f"<pre>{_escaped(message.content)}</pre>")
        for call in message.calls:
            name = _escaped(one_line(call.name))
            parts.append(
                f"<details><summary>Call {name}</summary><pre>{_escaped(pretty_arguments(call))}</pre></details>"
            )
        parts.append("</section>\n")
    return "".join(parts) + "</body></html>\n"


def as_json(
    conversations: Sequence[tuple[Conversation, MessageTree]], files: Mapping[str, bytes] | None = None
) -> bytes:
    """Return conversations with all branches as Layerdeck's JSON document. `files`: bytes of attachments by SHA-256."""
    # The format and its version come first, so that readers can refuse early.
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
    # Imported messages may hold lone surrogates, which UTF-8 cannot encode.
    return (json.dumps(document, ensure_ascii=False, indent=1) + "\n").encode("utf-8", "replace")


def as_openai(conversation: Conversation, messages: Sequence[Message]) -> bytes:
    """Return messages and tools as the JSON of a request to OpenAI's API.

    The text of attachments is included; images, sounds, thoughts and settings are not.
    """
    shown = [*([{"role": "system", "content": conversation.system}] if conversation.system else [])]
    document: dict[str, object] = {"messages": [*shown, *map(openai_message, messages)]}
    with suppress(ValueError):  # faulty definitions are of no use elsewhere
        if tools := read_tools(conversation.tools):
            document["tools"] = tools
    return (json.dumps(document, ensure_ascii=False, indent=1) + "\n").encode("utf-8", "replace")


def openai_message(message: Message) -> dict[str, object]:
    """Return a message as OpenAI's JSON object."""
    document: dict[str, object] = {"role": message.role, "content": message_text(message)}
    if message.calls:
        document["tool_calls"] = openai_calls(message.calls)
    if message.role == "tool":
        document["tool_call_id"] = message.call_id
    return document


def openai_calls(calls: Sequence[ToolCall]) -> list[dict[str, object]]:
    """Return tool calls as OpenAI's JSON list."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def copied_text(message: Message) -> str:
    """Return a message with its tool calls as Markdown, without heading, for Copy and Edit in the chat."""
    return "\n\n".join(filter(None, (message.content, *map(call_block, message.calls))))


def call_block(call: ToolCall) -> str:
    """Return a tool call as a Markdown code block, below a line with the function's name."""
    return f"Call of {one_line(call.name)}\n{fenced(pretty_arguments(call), 'json')}"


def data_address(attachment: Attachment, files: Mapping[str, bytes] | None) -> str:
    """Return the data URL of an image attachment.

    Empty if the attachment is no image of `IMAGE_TYPES`, or if its bytes are not in `files`.
    """
    is_image = attachment.kind == "image" and attachment.mime in IMAGE_TYPES
    return data_url(attachment, files) if is_image else ""


def data_url(attachment: Attachment, files: Mapping[str, bytes] | None) -> str:
    """Return an attachment as a data URL; empty if its bytes are not in `files`."""
    data = (files or {}).get(attachment.sha256)
    return "" if data is None else f"data:{attachment.mime};base64,{base64.b64encode(data).decode()}"


def heading(message: Message) -> str:
    """Return the heading of a message for an export: author, model and time (UTC)."""
    words = [_NAMES[message.role]]
    if message.model:
        words.append(f"({one_line(message.model)})")
    if message.created_ms:
        words.append(_time(message.created_ms))
    return " ".join(words)


def _time(time_ms: int) -> str:
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")
    # An imported file may claim any time.
    except (OverflowError, ValueError, OSError):
        return ""


def _escaped(text: str) -> str:
    """Escape a text for HTML. Control and bidirectional characters become replacement characters."""
    return html.escape(replace_controls(text, "\N{REPLACEMENT CHARACTER}"))
