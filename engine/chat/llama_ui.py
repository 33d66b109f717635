"""Exports conversations for llama.cpp's web UI: JSON lines, one for each conversation and each message.

The format is defined in tools/ui of llama.cpp (conversation-transfer.service.ts, database.d.ts). Each tree begins with
a message of type `root`; the system prompt is a message below it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence

from engine.chat.conversation import Conversation
from engine.chat.exports import data_address, openai_calls
from engine.chat.message import Attachment, Timings, new_id
from engine.chat.tree import MessageTree

HARNESS = "llama.app"


def as_jsonl(
    conversations: Sequence[tuple[Conversation, MessageTree]], files: Mapping[str, bytes] | None = None
) -> bytes:
    """Return conversations with all branches as JSON lines. `files`: bytes of attachments by their SHA-256."""
    lines = [line for conversation, tree in conversations for line in _lines(conversation, tree, files)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode("utf-8", "replace")


def _lines(
    conversation: Conversation, tree: MessageTree, files: Mapping[str, bytes] | None
) -> Iterator[dict[str, object]]:
    # llama.cpp's tree has one root without text; ours may have several first messages.
    root = new_id()
    top = new_id() if conversation.system else root
    beginnings = list(tree.children.get(None, ()))
    yield {
        "type": "session",
        "harness": HARNESS,
        "id": conversation.id,
        "name": conversation.title,
        "lastModified": conversation.updated_ms,
        "currNode": tree.leaf or top,
        "pinned": conversation.pinned,
        **({"forkedFromConversationId": conversation.forked_from} if conversation.forked_from else {}),
    }
    first_ms = conversation.created_ms
    below_root = [top] if top != root else beginnings
    yield _line(conversation.id, root, "root", "system", "", None, below_root, first_ms)
    if top != root:
        yield _line(conversation.id, top, "text", "system", conversation.system, root, beginnings, first_ms)
    for message in tree.messages.values():
        children = list(tree.children.get(message.id, ()))
        line = _line(
            conversation.id,
            message.id,
            "text",
            message.role,
            message.content,
            message.parent or top,
            children,
            message.created_ms,
        )
        more: dict[str, object] = {}
        if message.reasoning:
            more["reasoningContent"] = message.reasoning
        if message.calls:
            # The web UI keeps the list as text.
            more["toolCalls"] = json.dumps(openai_calls(message.calls), ensure_ascii=False)
        if message.call_id:
            more["toolCallId"] = message.call_id
        if message.model:
            more["model"] = message.model
        if message.timings is not None:
            more["timings"] = _timings(message.timings)
        if message.attachments:
            more["extra"] = [extra for each in message.attachments if (extra := _extra(each, files))]
        yield {**line, "message": {**_object(line["message"]), **more}}


def _extra(attachment: Attachment, files: Mapping[str, bytes] | None) -> dict[str, object]:
    """Return an attachment as the web UI's JSON object.

    Empty if the web UI has no type for this kind of file, or if the bytes are missing in `files` (bytes by SHA-256).
    """
    if address := data_address(attachment, files):
        return {"type": "IMAGE", "name": attachment.name, "base64Url": address}
    data = (files or {}).get(attachment.sha256)
    if attachment.kind == "audio" and data is not None:
        return {
            "type": "AUDIO",
            "name": attachment.name,
            "mimeType": attachment.mime,
            "base64Data": base64.b64encode(data).decode(),
        }
    if attachment.text:
        return {
            "type": "TEXT",
            "name": attachment.name,
            "size": attachment.size_bytes,
            "content": attachment.text,
        }
    return {}


def _line(
    conversation: str,
    ident: str,
    kind: str,
    role: str,
    content: str,
    parent: str | None,
    children: list[str],
    time_ms: int,
) -> dict[str, object]:
    return {
        "type": "message",
        "message": {
            "id": ident,
            "convId": conversation,
            "type": kind,
            "timestamp": time_ms,
            "role": role,
            "content": content,
            "parent": parent,
            "children": children,
        },
    }


def _timings(timings: Timings) -> dict[str, float]:
    found = {
        "cache_n": timings.cached_tokens,
        "prompt_n": timings.prompt_tokens - timings.cached_tokens,
        "prompt_ms": None if timings.prompt_seconds is None else 1000 * timings.prompt_seconds,
        "predicted_n": timings.generated_tokens,
        "predicted_ms": None if timings.generation_seconds is None else 1000 * timings.generation_seconds,
        "draft_n": None if timings.draft is None else timings.draft.drafted_tokens,
        "draft_n_accepted": None if timings.draft is None else timings.draft.accepted_tokens,
    }
    return {name: value for name, value in found.items() if value is not None}


def _object(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping)
    return value
