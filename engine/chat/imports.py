"""Reads exported conversations: Layerdeck's JSON and Markdown, the JSON of llama.cpp's web UI, and OpenAI's messages.

Files may come from strangers, so every size is limited. All ids are replaced by new ones: an import overwrites nothing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec import Struct, field

from engine.base.errors import ChatError
from engine.base.files import read_at_most
from engine.base.json_file import parse_json
from engine.base.language import tr
from engine.base.texts import show
from engine.base.values import replace
from engine.chat.attachments import as_attachment
from engine.chat.conversation import Conversation, title_of_message
from engine.chat.exports import FORMAT, VERSION
from engine.chat.markdown_file import is_markdown_file, read_markdown
from engine.chat.message import MAX_CHOICES, ROLES, Attachment, Message, Role, new_id, now_ms
from engine.chat.tool_calls import new_call_id
from engine.chat.tools import MAX_CHARACTERS
from engine.chat.tree import MessageTree, mended_tree, renamed_cut, tree_of
from engine.planning.settings.sampling_sources import usable_settings
from engine.runtime.media.images.pictures import MAX_IMAGE_BYTES, MAX_SIDE_PX, is_image
from engine.runtime.media.sounds.recordings import MAX_LENGTH_MS, MAX_SOUND_BYTES, is_sound
from engine.runtime.protocol.requests import ToolCall

MAX_BYTES = 256 << 20
MAX_CONVERSATIONS = 20_000
MAX_MESSAGES = 1_000_000
MAX_CALLS = 1000
"""Largest number of tool calls of one message."""
MAX_LABEL_CHARACTERS = 500
"""Largest number of characters in titles, folders, and names of models, presets and files."""
_TOO_LARGE = 1 << 52
"""Times in ms and sizes in an imported file are read as 0 if they are not below this limit.

Larger numbers might not fit into the database's integers of 64 bits.
"""
_IMAGE_EXTRAS = ("IMAGE", "imageFile")
"""Types of an attached image in the web UI's JSON, now and in earlier versions."""
_SOUND_EXTRAS = ("AUDIO", "audioFile")


class Imported(Struct, frozen=True):
    """An imported conversation. `tree`: its messages. `files`: bytes of its attachments by SHA-256."""

    conversation: Conversation
    tree: MessageTree
    files: Mapping[str, bytes] = field(default_factory=dict)


def read_conversations(path: Path) -> tuple[Imported, ...]:
    """Return the conversations of a file.

    Raises:
        ChatError: the file cannot be read; the sentence names it.
    """
    try:
        data = read_at_most(path, MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ChatError(
            tr("{name} cannot be read ({reason}); check the path.", name=path.name, reason=reason)
        ) from None
    return parse_conversations(data, source=path.name)


def parse_conversations(data: bytes, *, source: str) -> tuple[Imported, ...]:
    """Return the conversations in a document.

    `source`: file name for error messages.

    Raises:
        ChatError: the document cannot be read; the sentence names `source`.
    """
    if len(data) > MAX_BYTES:
        raise ChatError(
            tr("{source} is larger than {max_bytes} MiB; split the file.", source=source, max_bytes=MAX_BYTES >> 20)
        )
    found: tuple[Imported, ...]
    try:
        text = data.decode("utf-8-sig")
        first = text.lstrip()[:1]
        lines = text.split("\n")  # Not splitlines: texts in JSON may contain U+2028 and others.
        if is_markdown_file(text):
            found = (_from_markdown(text),)
        elif first not in ("{", "["):
            raise ChatError(
                tr("{source} cannot be imported. Choose a file that Layerdeck or llama.cpp exported.", source=source)
            )
        elif first == "{" and len(lines) > 1 and _is_session(lines):
            found = tuple(_from_lines(lines))
        else:
            found = tuple(_from_document(parse_json(text)))
    except UnicodeDecodeError:
        raise ChatError(
            tr("{source} is not UTF-8 text; choose a file of exported conversations.", source=source)
        ) from None
    except RecursionError:
        raise ChatError(
            tr(
                "{source} is nested too deeply for an export of conversations; choose a file that Layerdeck or "
                "llama.cpp exported.",
                source=source,
            )
        ) from None
    except (ValueError, TypeError, KeyError, msgspec.ValidationError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ChatError(tr("{source} cannot be imported: {reason}.", source=source, reason=reason)) from None
    if not found:
        raise ChatError(tr("{source} contains no conversations.", source=source))
    return found


# ------------------------------------------------------------------ our document


def _from_document(document: object) -> Iterator[Imported]:
    if isinstance(document, list) and document and all(isinstance(each, dict) and "role" in each for each in document):
        yield _from_openai({"messages": document})
        return
    if isinstance(document, list) or (isinstance(document, dict) and "conv" in document):
        # The older format of llama.cpp's web UI: one conversation with its messages, or a list of them.
        for item in _limited(document if isinstance(document, list) else [document], MAX_CONVERSATIONS):
            yield _llama_conversation(_dict(_dict(item).get("conv")), _list(_dict(item).get("messages"), "messages"))
        return
    root = _dict(document)
    if isinstance(root.get("messages"), list) and "format" not in root:
        yield _from_openai(root)
        return
    if root.get("format") != FORMAT:
        _refuse(tr("the file was not exported by Layerdeck or llama.cpp"))
    if root.get("version") != VERSION:
        _refuse(
            tr(
                "the file has version {found!r}, but this program reads version {version}; update Layerdeck",
                found=root.get("version"),
                version=VERSION,
            )
        )
    files = dict(_files(_dict(root.get("files", {}))))
    for item in _limited(_list(root.get("conversations"), "conversations"), MAX_CONVERSATIONS):
        entry = _dict(item)
        conversation = msgspec.convert(entry.get("conversation"), Conversation)
        messages = [
            msgspec.convert(message, Message)
            for message in _limited(_list(entry.get("messages"), "messages"), MAX_MESSAGES)
        ]
        yield _imported(conversation, messages, entry.get("leaf"), files)


def _from_openai(request: Mapping[str, Any]) -> Imported:
    """Return the conversation in the JSON of a request to OpenAI's API, with the tools of the request."""
    messages: list[Message] = []
    for record in map(_dict, _limited(_list(request["messages"], "messages"), MAX_MESSAGES)):
        role = record.get("role")
        content = record.get("content")
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, dict)]
            content = "\n".join(part for part in parts if isinstance(part, str))
        messages.append(
            Message(
                id=new_id(),
                role=_role("system" if role == "developer" else role),
                content=_text(content),
                parent=messages[-1].id if messages else None,
                reasoning=_text(record.get("reasoning_content")),
                calls=_openai_calls(record.get("tool_calls")),
                call_id=_text(record.get("tool_call_id")),
            )
        )
    tools = request.get("tools")
    system, tree = _without_system(_renamed(messages, messages[-1].id if messages else None))
    question = next((message for message in tree.path if message.role == "user"), None)
    return Imported(
        Conversation(
            id=new_id(),
            title="" if question is None else title_of_message(question),
            system=system,
            tools=_tools(json.dumps(tools, ensure_ascii=False, indent=2) if tools else ""),
            leaf=tree.leaf,
            created_ms=now_ms(),
            updated_ms=now_ms(),
        ),
        tree,
    )


def _openai_calls(value: object) -> tuple[ToolCall, ...]:
    if isinstance(value, str) and value:
        value = parse_json(value)  # llama.cpp's web UI keeps the list as text
    if not value:
        return ()
    calls = []
    for item in map(_dict, _limited(_list(value, "tool_calls"), MAX_CALLS)):
        function = _dict(item.get("function"))
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        calls.append(ToolCall(_text(item.get("id")), _text(function.get("name")), text))
    return tuple(calls)


def _role(role: object) -> Role:
    if role not in ROLES:
        _refuse(
            tr(
                "a message has the role {role!r}; the role must be one of {names}",
                role=str(role)[:40],
                names=", ".join(ROLES),
            )
        )
    return role


def _tools(text: str) -> str:
    """Return `text`, the tool definitions of an imported conversation, unchanged.

    Raises:
        ValueError: `text` has more than `MAX_CHARACTERS` characters.
    """
    if len(text) > MAX_CHARACTERS:
        _refuse(
            tr(
                "the tool definitions of a conversation have more than {most} characters; shorten them",
                most=MAX_CHARACTERS,
            )
        )
    return text


def _from_markdown(text: str) -> Imported:
    found = read_markdown(text)
    messages = _limited(found.messages, MAX_MESSAGES)
    return _imported(found.conversation, messages, found.conversation.leaf, found.files)


def _imported(
    conversation: Conversation, messages: Sequence[Message], leaf: object, files: Mapping[str, bytes]
) -> Imported:
    """Return a conversation of our own format with new ids and checked attachments.

    `leaf`: id of the last shown message in the file.
    `files`: bytes of attachments by SHA-256.
    """
    _check_media(messages, files)
    tree = _renamed(messages, leaf)
    used = {each.sha256 for message in messages for each in message.attachments}
    return Imported(
        replace(
            conversation,
            id=new_id(),
            title=_label(conversation.title),
            folder=_label(conversation.folder),
            preset=_label(conversation.preset),
            tools=_tools(conversation.tools),
            settings=dict(usable_settings(conversation.settings)),
            # Their keys have the old ids of messages.
            results={},
            leaf=tree.leaf,
            created_ms=_whole(conversation.created_ms),
            updated_ms=_whole(conversation.updated_ms),
            # The imported conversation is a new one: neither deleted nor branched from one that is here.
            deleted_ms=None,
            forked_from=None,
        ),
        tree,
        {sha256: files[sha256] for sha256 in used & files.keys()},
    )


def _files(encoded: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    for name, text in encoded.items():
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, TypeError) as error:
            raise ValueError(tr("an attachment is damaged: {error}", error=error)) from None
        # Bytes are stored by checksum: under a wrong one they would become those of another attachment.
        if hashlib.sha256(data).hexdigest() != name:
            _refuse(tr("an attachment does not match its checksum"))
        yield name, data


def _check_media(messages: Sequence[Message], files: Mapping[str, bytes]) -> None:
    """Raise ValueError for an image or sound that is too large, or has an unknown header or an impossible size.

    Images and sounds are not decoded here, but when they are needed.

    `files`: bytes of attachments by SHA-256.
    """
    for message in messages:
        for each in message.attachments:
            data = files.get(each.sha256)
            if data is not None and each.kind == "image":
                _check_image(each, data)
            elif data is not None and each.kind == "audio":
                _check_sound(each, data)


def _check_image(attachment: Attachment, data: bytes) -> None:
    if not is_image(data) or len(data) > MAX_IMAGE_BYTES:
        _refuse(tr("an attached image is too large, or not an image"))
    if not (0 < attachment.width_px <= MAX_SIDE_PX and 0 < attachment.height_px <= MAX_SIDE_PX):
        _refuse(tr("an attached image has an invalid size"))


def _check_sound(attachment: Attachment, data: bytes) -> None:
    if not is_sound(data) or len(data) > MAX_SOUND_BYTES:
        _refuse(tr("an attached sound is too large, or not a sound"))
    if not 0 < attachment.length_ms <= MAX_LENGTH_MS:
        _refuse(tr("an attached sound has an invalid length"))


# ------------------------------------------------------------------ llama.cpp's lines


def _is_session(lines: Sequence[str]) -> bool:
    first = next((line for line in lines if line.strip()), "")
    try:
        record = parse_json(first)
    except ValueError:
        return False
    return isinstance(record, dict) and record.get("type") == "session"


def _from_lines(lines: Sequence[str]) -> Iterator[Imported]:
    session: dict[str, Any] | None = None
    messages: list[Any] = []
    count = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = _dict(parse_json(line))
        except ValueError as error:
            raise ValueError(tr("line {number}: {error}", number=number, error=error)) from None
        if record.get("type") == "session":
            if session is not None:
                yield _llama_conversation(session, messages)
            session, messages, count = record, [], count + 1
            if count > MAX_CONVERSATIONS:
                _refuse(
                    tr(
                        "the file contains more than {max_conversations} conversations; split the file",
                        max_conversations=MAX_CONVERSATIONS,
                    )
                )
        elif record.get("type") == "message":
            messages.append(record.get("message"))
    if session is not None:
        yield _llama_conversation(session, messages)


def _llama_conversation(session: Mapping[str, Any], items: Sequence[Any]) -> Imported:
    records = [_dict(item) for item in _limited(items, MAX_MESSAGES)]
    # llama.cpp's tree begins with a root message without text. Its children become first messages.
    roots = {str(record.get("id")): record.get("parent") for record in records if record.get("type") == "root"}
    files: dict[str, bytes] = {}
    messages = [_llama_message(record, roots, files) for record in records if record.get("type") != "root"]
    system, tree = _without_system(_renamed(messages, session.get("currNode")))
    modified_ms = _whole(session.get("lastModified"))
    created_ms = min((message.created_ms for message in messages), default=modified_ms)
    return Imported(
        Conversation(
            id=new_id(),
            title=_label(str(session.get("name") or "")),
            system=system,
            pinned=session.get("pinned") is True,
            leaf=tree.leaf,
            created_ms=created_ms,
            updated_ms=modified_ms,
        ),
        tree,
        files,
    )


def _llama_message(record: Mapping[str, Any], roots: Mapping[str, Any], files: dict[str, bytes]) -> Message:
    """Return a message of the web UI's JSON, and add the bytes of its images and sounds to `files`.

    `record`: JSON object of the message.
    `roots`: its keys are the ids of messages of type `root`; messages below them become the first messages of the tree.
    """
    parent = record.get("parent")
    attachments = []
    for extra in record.get("extra") or ():
        if _dict(extra).get("type") in _IMAGE_EXTRAS:
            attachments.append(_llama_image(extra, files))
            continue
        if _dict(extra).get("type") in _SOUND_EXTRAS:
            attachments.append(_llama_sound(extra, files))
            continue
        text = _dict(extra).get("content")
        if isinstance(text, str) and text:
            attachments.append(
                Attachment(
                    id=new_id(),
                    kind="text",
                    name=str(extra.get("name") or "file"),
                    mime="text/plain",
                    sha256="",
                    size_bytes=len(text.encode("utf-8", "replace")),
                    text=text,
                )
            )
    return Message(
        id=str(record.get("id")),
        role=_role(record.get("role")),
        content=_text(record.get("content")),
        parent=None if parent is None or str(parent) in roots else str(parent),
        reasoning=_text(record.get("reasoningContent") or record.get("thinking")),
        model=_text(record.get("model")),
        calls=_openai_calls(record.get("toolCalls")),
        call_id=_text(record.get("toolCallId")),
        created_ms=_whole(record.get("timestamp")),
        attachments=tuple(attachments),
    )


def _llama_image(extra: Mapping[str, Any], files: dict[str, bytes]) -> Attachment:
    """Return an attached image, and add its bytes to `files` by SHA-256.

    The image is decoded, which takes a moment, because the JSON lacks its size in pixels.

    `extra`: the web UI's JSON object of the attachment.
    """
    _, _, encoded = _text(extra.get("base64Url")).partition(";base64,")
    try:
        found = as_attachment(base64.b64decode(encoded, validate=True), str(extra.get("name") or "image"))
    except (binascii.Error, ChatError) as error:
        raise ValueError(tr("an image cannot be read: {error}", error=error)) from None
    files[found.attachment.sha256] = found.data
    return found.attachment


def _llama_sound(extra: Mapping[str, Any], files: dict[str, bytes]) -> Attachment:
    """Return an attached sound, and add its bytes to `files` by SHA-256.

    The sound is decoded, which takes a moment, because the JSON lacks its length.

    `extra`: the web UI's JSON object of the attachment.
    """
    try:
        found = as_attachment(
            base64.b64decode(_text(extra.get("base64Data")), validate=True), str(extra.get("name") or "sound")
        )
    except (binascii.Error, ChatError) as error:
        raise ValueError(tr("a sound cannot be read: {error}", error=error)) from None
    files[found.attachment.sha256] = found.data
    return found.attachment


# ------------------------------------------------------------------ parts


def _renamed(messages: Sequence[Message], leaf: object) -> MessageTree:
    """Return imported messages as a tree with new ids, and with names and labels of limited length.

    Messages in state `writing` become `interrupted`. `leaf`: id of the last shown message in the file.
    """
    # The file may have missing parents or circles: a mended tree has neither.
    tree = mended_tree(messages, leaf if isinstance(leaf, str) else None)
    ids = {message: new_id() for message in tree.messages}
    copies = [
        replace(
            message,
            id=ids[message.id],
            parent=None if message.parent is None else ids[message.parent],
            state="interrupted" if message.state == "writing" else message.state,
            model=_label(message.model),
            model_identity=_label(message.model_identity),
            layout=_label(message.layout),
            settings=dict(usable_settings(message.settings)),
            created_ms=_whole(message.created_ms),
            stop_reason=_label(message.stop_reason),
            note=show(message.note),
            attachments=tuple(
                replace(
                    each,
                    id=new_id(),
                    name=_label(each.name),
                    mime=_label(each.mime),
                    size_bytes=_whole(each.size_bytes),
                    width_px=_whole(each.width_px),
                    height_px=_whole(each.height_px),
                    length_ms=_whole(each.length_ms),
                )
                for each in message.attachments
            ),
            choices=message.choices[:MAX_CHOICES],
            calls=tuple(
                ToolCall(_label(call.id), _label(call.name), call.arguments) for call in _with_ids(message.calls)
            ),
            call_id=_label(message.call_id),
            cut=renamed_cut(message.cut, ids),
        )
        for message in tree.messages.values()
    ]
    return mended_tree(copies, None if tree.leaf is None else ids[tree.leaf])


def _with_ids(calls: Sequence[ToolCall]) -> Iterator[ToolCall]:
    """Yield the tool calls, each with a unique id. A tool result refers to its call by this id."""
    seen: set[str] = set()
    for call in _limited(calls, MAX_CALLS):
        ident = new_call_id() if not call.id or call.id in seen else call.id
        seen.add(ident)
        yield ToolCall(ident, call.name, call.arguments)


def _without_system(tree: MessageTree) -> tuple[str, MessageTree]:
    """Separate the system prompt from an imported tree; return the prompt, and the tree without it.

    The prompt is the root message if that is a system message and the only root. Otherwise return "" and the unchanged
    tree. A system message in the tree would be sent to the model, but people could neither see nor edit it.
    """
    beginnings = tree.children.get(None, ())
    first = tree.messages[beginnings[0]] if len(beginnings) == 1 else None
    if first is None or first.role != "system":
        return "", tree
    left = [
        replace(message, parent=None) if message.parent == first.id else message
        for message in tree.messages.values()
        if message is not first
    ]
    return first.content, tree_of(left, None if tree.leaf == first.id else tree.leaf)


def _label(text: str) -> str:
    """Return a text for labels and lists: on one line, escaped and short."""
    return show(text, MAX_LABEL_CHARACTERS)


def _dict(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(tr("a value in the file must be a JSON object, but has another type; export the conversations again"))
    return value


def _list(value: object, key: str) -> list[Any]:
    if not isinstance(value, list):
        _refuse(tr('the list "{key}" is missing', key=key))
    return value


def _limited(items: Sequence[Any], most: int) -> Sequence[Any]:
    if len(items) > most:
        _refuse(
            tr(
                "a list in the file has {count} entries; at most {most} entries are allowed",
                count=len(items),
                most=most,
            )
        )
    return items


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _whole(value: object) -> int:
    """Return a number of the imported file (a time or a size) as an integer; 0 if it is not a valid number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _TOO_LARGE:
        return 0
    return int(value)


def _refuse(reason: str) -> NoReturn:
    raise ValueError(reason)
