"""Writes the messages of a conversation's shown branch as a Markdown file, and reads such a file.

People and other programs read the file as plain Markdown. The fields of a message that its text does not show are in an
HTML comment below the message's heading, which Markdown viewers hide. All these comments begin with one key that occurs
nowhere else in the file. So text that looks like our headings or comments stays text, and people may edit the text of a
message by hand. Only the probabilities of tokens (`Message.choices`) are not written.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from engine.base.json_file import parse_json
from engine.base.language import tr
from engine.base.texts import fenced, one_line
from engine.base.values import replace
from engine.chat.conversation import Conversation
from engine.chat.exports import call_block, data_address, data_url, heading
from engine.chat.message import Attachment, Message
from engine.runtime.media.sounds.recordings import MIMES

VERSION = 1
KEY_CHARACTERS = 12
_FIRST = re.compile(r"^<!-- layerdeck-conversation (\d+) ([0-9a-f]+) (\{.*\}) -->$", re.MULTILINE)
SOUND_TYPES = frozenset(MIMES.values())
_SYSTEM = {"part": "system"}
_HIDDEN_OF_CHAT = ("id", "system", "leaf", "draft", "results", "forked_from", "deleted_ms")
"""Fields of a conversation that its HTML comment omits, because the text shows them or another database cannot use
them.
"""
_HIDDEN_OF_MESSAGE = ("parent", "content", "reasoning", "choices")


class MarkdownConversation(Struct, frozen=True):
    """A conversation read from a Markdown file. `files`: bytes of its attachments by SHA-256."""

    conversation: Conversation
    messages: tuple[Message, ...]
    files: Mapping[str, bytes]


def as_markdown(
    conversation: Conversation, messages: Sequence[Message], files: Mapping[str, bytes] | None = None
) -> str:
    """Return messages as a Markdown file that `read_markdown` can read.

    `files`: bytes of attachments by SHA-256. Images and sounds among them become data URLs in the text.
    """
    parts = _parts(conversation, messages, files)
    # The key marks our comments; text of a message that looks like one has another key.
    key = _key_for(text for _, _, text in parts)
    first = {name: value for name, value in msgspec.to_builtins(conversation).items() if name not in _HIDDEN_OF_CHAT}
    written = [f"# {_title(conversation)}\n<!-- layerdeck-conversation {VERSION} {key} {_comment(first)} -->\n"]
    for title, values, text in parts:
        written.append(f"## {title}\n<!-- {key} {_comment(values)} -->\n\n{text}\n")
    return "\n".join(written)


def is_markdown_file(text: str) -> bool:
    """Return whether a text was written by `as_markdown`."""
    return text.startswith("# ") and _FIRST.search(_with_line_feeds(text)) is not None


def read_markdown(text: str) -> MarkdownConversation:
    """Return the conversation that `as_markdown` wrote.

    Raises:
        ValueError: the file was changed so that it cannot be read; the message has the reason.
    """
    text = _with_line_feeds(text)
    first = _FIRST.search(text)
    if first is None:
        raise ValueError(
            tr("the comment that Layerdeck writes below the title is missing; export the conversation again")
        )
    if int(first[1]) != VERSION:
        raise ValueError(
            tr(
                "the file has version {found!r}, but this program reads version {version}; update Layerdeck",
                found=int(first[1]),
                version=VERSION,
            )
        )
    comments = list(re.finditer(rf"^<!-- {first[2]} (\{{.*\}}) -->$", text, re.MULTILINE))
    conversation = msgspec.convert({**_values(first[3]), "id": ""}, Conversation)
    shown_title = text[: first.start()].removeprefix("# ").strip()
    if shown_title != _title(conversation):
        conversation = replace(conversation, title=shown_title)  # edited by hand
    system = ""
    messages: list[Message] = []
    files: dict[str, bytes] = {}
    for number, comment in enumerate(comments):
        # The heading of the next part is the line before its comment.
        end = len(text) if number + 1 == len(comments) else text.rfind("\n##", 0, comments[number + 1].start())
        part = text[comment.end() : max(end, comment.end())].removeprefix("\n\n").removesuffix("\n")
        values = _values(comment[1])
        # The system prompt is a part without a message.
        if values == _SYSTEM:
            system = part
            continue
        found, bytes_of = _read_message(values, part, messages[-1].id if messages else None)
        messages.append(found)
        files |= bytes_of
    leaf = messages[-1].id if messages else None
    return MarkdownConversation(replace(conversation, system=system, leaf=leaf), tuple(messages), files)


# ------------------------------------------------------------------ writing


def _parts(
    conversation: Conversation, messages: Sequence[Message], files: Mapping[str, bytes] | None
) -> list[tuple[str, dict[str, Any], str]]:
    """Return the parts of the file as (heading, fields for the HTML comment, text): the system prompt, then each
    message.

    `files`: bytes of attachments by SHA-256; None: no bytes are written.
    """
    parts: list[tuple[str, dict[str, Any], str]] = []
    if conversation.system:
        parts.append(("System", dict(_SYSTEM), conversation.system))
    for message in messages:
        values = msgspec.to_builtins(message)
        for name in _HIDDEN_OF_MESSAGE:
            values.pop(name, None)
        for attachment in values["attachments"]:
            # The text of an attachment is visible in the file; its comment only says how long it is.
            attachment["lines"] = attachment.pop("text").count("\n") + 1
        if not message.calls:
            del values["calls"]
        if not message.call_id:
            del values["call_id"]
        values["reasoning_lines"] = len(_quoted(message.reasoning))
        blocks = [_attached(each, files) for each in message.attachments]
        if message.reasoning:
            blocks.append("\n".join(_quoted(message.reasoning)))
        # For readers only: the comment has the calls.
        calls = list(map(call_block, message.calls))
        values |= {"call_lines": sum(block.count("\n") + 2 for block in calls)} if calls else {}
        parts.append((heading(message), values, "\n\n".join([*blocks, message.content, *calls])))
    return parts


def _attached(attachment: Attachment, files: Mapping[str, bytes] | None) -> str:
    """Return an attachment as Markdown: an image, a link for a sound, or a code block for text.

    `files`: bytes of attachments by SHA-256. If the bytes of an image or a sound are missing, only its name is written.
    """
    name = _bracketed(one_line(attachment.name))
    if address := data_address(attachment, files):
        return f"![{name}]({address})"
    if attachment.kind == "audio" and attachment.mime in SOUND_TYPES and (address := data_url(attachment, files)):
        return f"[Attached: {name}]({address})"
    words = f"Attached: {one_line(attachment.name)}"
    return f"{words}\n{fenced(attachment.text)}" if attachment.text else words


def _quoted(reasoning: str) -> list[str]:
    if not reasoning:
        return []
    return [f"> {line}" if line else ">" for line in reasoning.split("\n")]


def _title(conversation: Conversation) -> str:
    return one_line(conversation.title) or "Conversation"


def _comment(values: Mapping[str, Any]) -> str:
    """Return values as one line of JSON for an HTML comment.

    `--`, `<` and `>` are escaped, so that no value can end the comment.
    """
    text = json.dumps(values, ensure_ascii=False)
    return text.replace("--", "-\\u002d").replace("<", "\\u003c").replace(">", "\\u003e")


def _key_for(texts: Iterable[str]) -> str:
    """Return a key that marks the comments of one Markdown file: a text that occurs in none of `texts`.

    Equal texts always get the same key.
    """
    whole = "\n".join(texts)
    # A digest and not a random key: the same conversation gives the same file.
    digest = hashlib.sha256(whole.encode("utf-8", "replace"))
    while (key := digest.hexdigest()[:KEY_CHARACTERS]) in whole:
        digest.update(b"again")
    return key


def _bracketed(text: str) -> str:
    return text.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")


# ------------------------------------------------------------------ reading


def _with_line_feeds(text: str) -> str:
    """Return a file's text with LF line ends, even if an editor on Windows has saved it with CRLF."""
    return text.replace("\r\n", "\n") if text[: text.find("\n")].endswith("\r") else text


def _read_message(values: dict[str, Any], part: str, parent: str | None) -> tuple[Message, dict[str, bytes]]:
    """Return a message of a Markdown file, and the bytes of its attachments by SHA-256.

    `values`: fields from the HTML comment below the message's heading.
    `part`: the text below that comment.
    `parent`: id of the previous message.
    """
    quoted = _count(values.pop("reasoning_lines", 0))
    lines = part.split("\n")
    files: dict[str, bytes] = {}
    attachments = values.get("attachments", [])
    if not isinstance(attachments, list) or not all(isinstance(each, dict) for each in attachments):
        raise ValueError(tr("the list of attachments of a message is damaged; export the conversation again"))
    for attachment in attachments:
        attachment["text"] = _take_attached(lines, _count(attachment.pop("lines", 1)), attachment.get("sha256"), files)
    call_lines = _count(values.pop("call_lines", 0))
    if 1 < call_lines <= len(lines) and lines[len(lines) - call_lines + 1].startswith("Call of "):
        del lines[len(lines) - call_lines :]
    reasoning: list[str] = []
    while len(reasoning) < quoted and lines and lines[0].startswith(">"):
        reasoning.append(lines.pop(0).removeprefix(">").removeprefix(" "))
    if reasoning:
        _take_blank(lines)
    message = msgspec.convert(
        {**values, "content": "\n".join(lines), "reasoning": "\n".join(reasoning), "parent": parent}, Message
    )
    return message, files


def _count(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(tr("a message states an invalid number of lines; export the conversation again"))
    return value


def _take_attached(lines: list[str], count: int, sha256: object, files: dict[str, bytes]) -> str:
    """Remove the Markdown of an attachment from the beginning of `lines`, and return the attachment's text.

    The text is empty for an image or a sound. Their bytes are decoded from the data URL and added to `files`. Nothing
    is removed if a person has deleted the attachment from the file.

    `count`: number of lines of the attachment's text.
    `sha256`: expected SHA-256 of the decoded bytes.
    """
    if not lines or not re.match(r"!\[|\[?Attached: ", lines[0]):
        return ""  # removed by hand
    address = re.search(r"\(data:[^;]*;base64,([^)]*)\)$", lines.pop(0))
    text = ""
    if address is not None:
        try:
            data = base64.b64decode(address[1], validate=True)
        except binascii.Error as error:
            raise ValueError(tr("an attachment is damaged: {error}", error=error)) from None
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError(tr("an attachment does not match its checksum"))
        files[str(sha256)] = data
    elif lines and lines[0].startswith("```"):
        text = "\n".join(lines[1 : 1 + count])
        del lines[: count + 2]
    _take_blank(lines)
    return text


def _take_blank(lines: list[str]) -> None:
    if lines and not lines[0]:
        del lines[0]


def _values(text: str) -> dict[str, Any]:
    values = parse_json(text)
    if not isinstance(values, dict):
        raise TypeError(
            tr("a value in the file must be a JSON object, but has another type; export the conversations again")
        )
    return values
