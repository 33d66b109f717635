"""From what is shown of a conversation to what a model is asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from engine.chats.message import Attachment, Message
from engine.chats.thinking import CONTROL_MARKS, FAMILIES
from engine.errors import ChatError
from engine.protocol.messages import ChatMessage, CountTokens, Generate, ImageFile, MediaFile, SoundFile
from engine.settings.sampling_settings import SamplingSettings

MAX_SENT_BYTES = 96 << 20
"""Of the images and sounds of one request: all of it is in memory several times on its way."""
SYSTEM = ""
"""Stands for the system prompt where there are ids of messages."""


def chat_messages(system: str, shown: Sequence[Message]) -> tuple[ChatMessage, ...]:
    """Return what a template is given, as `messages_by_id` has it."""
    return tuple(messages_by_id(system, shown).values())


def messages_by_id(system: str, shown: Sequence[Message]) -> Mapping[str, ChatMessage]:
    """Return what a template is given, by message: the system prompt, then what was said, with text of attachments,
    images and sounds, of which `with_files` has the bytes.

    Thoughts are left out, and questions whose answer never came: templates want question and answer in turns.
    """
    found = {SYSTEM: ChatMessage("system", system)} if system.strip() else {}
    for place, message in enumerate(shown):
        follower = shown[place + 1] if place + 1 < len(shown) else None
        unanswered = message.role == "user" and follower is not None and not _says_something(follower)
        if _says_something(message) and not unanswered:
            role = "user" if message.role == "tool" else message.role
            found[message.id] = ChatMessage(role, message_text(message), media_of(message))
    return found


def message_text(message: Message) -> str:
    """Return a message with the text of what is attached to it, that first."""
    return "\n\n".join([*texts_of(message), message.content]).strip("\n")


def media_of(message: Message) -> tuple[MediaFile, ...]:
    """Return the images and sounds of a message, without their bytes."""
    return tuple(file for each in message.attachments if (file := media_file(each)) is not None)


def media_file(attachment: Attachment) -> MediaFile | None:
    """Return an attached image or sound, without its bytes; None where it is text."""
    match attachment.kind:
        case "image":
            return ImageFile(sha256=attachment.sha256, width_px=attachment.width_px, height_px=attachment.height_px)
        case "audio":
            return SoundFile(sha256=attachment.sha256, length_ms=attachment.length_ms)
    return None


def names_of_media(messages: Iterable[ChatMessage]) -> tuple[str, ...]:
    """Return which files `with_files` needs, by their SHA-256."""
    return tuple(dict.fromkeys(file.sha256 for message in messages for file in message.media))


def with_files(messages: Iterable[ChatMessage], files: Mapping[str, bytes]) -> tuple[ChatMessage, ...]:
    """Return messages with the bytes of their images and sounds.

    Raises:
        ChatError: one is missing, or together they are too large to be sent.
    """
    filled = tuple(
        msgspec.structs.replace(message, media=tuple(_with_bytes(file, files) for file in message.media))
        for message in messages
    )
    if sum(len(file.data) for message in filled for file in message.media) > MAX_SENT_BYTES:
        raise ChatError(
            f"The images and sounds of this conversation are larger than {MAX_SENT_BYTES >> 20} MiB together; begin a"
            " new one, or branch from before some of them."
        )
    return filled


def _with_bytes(file: MediaFile, files: Mapping[str, bytes]) -> MediaFile:
    if file.sha256 not in files:
        what = "A sound" if isinstance(file, SoundFile) else "An image"
        raise ChatError(f"{what} of this conversation is not kept any more; delete its turn, or attach it again.")
    return msgspec.structs.replace(file, data=files[file.sha256])


def texts_of(message: Message) -> list[str]:
    """Return the texts of what is attached to a message and is neither image nor sound."""
    return [attachment_text(each) for each in message.attachments if media_file(each) is None]


def attachment_text(attachment: Attachment) -> str:
    """Return how a model is shown a file; a fence in it does not end it."""
    if not attachment.text:
        return f"File: {attachment.name} (not text)"
    fence = "```"
    while fence in attachment.text:
        fence += "`"
    return f"File: {attachment.name}\n{fence}\n{attachment.text}\n{fence}"


def answer_request(
    messages: Iterable[ChatMessage], settings: SamplingSettings, *, begun: str = "", template: str = ""
) -> Generate:
    """Return the request for an answer. `begun`: what of it is there already (`thinking.begun_answer`)."""
    return Generate(
        messages=tuple(messages),
        sampling=settings,
        template=template,
        begun=begun,
        thinking=tuple((marks.begin, marks.end) for marks in FAMILIES),
        marks=tuple(sorted(CONTROL_MARKS)),
    )


def count_request(messages: Iterable[ChatMessage], shown: Sequence[Message] = (), *, template: str = "") -> CountTokens:
    """Return the request that counts a conversation, and what is attached to each message of it."""
    return CountTokens(
        messages=tuple(messages),
        texts=tuple("\n\n".join(texts_of(each)) for each in shown),
        template=template,
    )


def _says_something(message: Message) -> bool:
    return bool(message.content.strip() or message.attachments)
