"""From what is shown of a conversation to what a model is asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from engine.chats.message import Attachment, Message
from engine.chats.thinking import CONTROL_MARKS, FAMILIES
from engine.errors import ChatError
from engine.protocol.messages import ChatMessage, CountTokens, Generate, ImageFile
from engine.settings.sampling_settings import SamplingSettings

MAX_SENT_BYTES = 96 << 20
"""Of the images of one request: all of it is in memory several times on its way."""
SYSTEM = ""
"""Stands for the system prompt where there are ids of messages."""


def chat_messages(system: str, shown: Sequence[Message]) -> tuple[ChatMessage, ...]:
    """Return what a template is given, as `messages_by_id` has it."""
    return tuple(messages_by_id(system, shown).values())


def messages_by_id(system: str, shown: Sequence[Message]) -> Mapping[str, ChatMessage]:
    """Return what a template is given, by message: the system prompt, then what was said, with text of attachments and
    images, of which `with_files` has the bytes.

    Thoughts are left out, and questions whose answer never came: templates want question and answer in turns.
    """
    found = {SYSTEM: ChatMessage("system", system)} if system.strip() else {}
    for place, message in enumerate(shown):
        follower = shown[place + 1] if place + 1 < len(shown) else None
        unanswered = message.role == "user" and follower is not None and not _says_something(follower)
        if _says_something(message) and not unanswered:
            role = "user" if message.role == "tool" else message.role
            found[message.id] = ChatMessage(role, message_text(message), images_of(message))
    return found


def message_text(message: Message) -> str:
    """Return a message with the text of what is attached to it, that first."""
    texts = [attachment_text(each) for each in message.attachments if each.kind != "image"]
    return "\n\n".join([*texts, message.content]).strip("\n")


def images_of(message: Message) -> tuple[ImageFile, ...]:
    """Return the images of a message, without their bytes."""
    return tuple(map(image_of, (each for each in message.attachments if each.kind == "image")))


def image_of(attachment: Attachment) -> ImageFile:
    """Return an attached image, without its bytes."""
    return ImageFile(sha256=attachment.sha256, width_px=attachment.width_px, height_px=attachment.height_px)


def names_of_images(messages: Iterable[ChatMessage]) -> tuple[str, ...]:
    """Return which files `with_files` needs, by their SHA-256."""
    return tuple(dict.fromkeys(image.sha256 for message in messages for image in message.images))


def with_files(messages: Iterable[ChatMessage], files: Mapping[str, bytes]) -> tuple[ChatMessage, ...]:
    """Return messages with the bytes of their images.

    Raises:
        ChatError: one is missing, or together they are too large to be sent.
    """
    filled = tuple(
        msgspec.structs.replace(message, images=tuple(_with_bytes(image, files) for image in message.images))
        for message in messages
    )
    if sum(len(image.data) for message in filled for image in message.images) > MAX_SENT_BYTES:
        raise ChatError(
            f"The images of this conversation are larger than {MAX_SENT_BYTES >> 20} MiB together; begin a new one, or"
            " branch from before some of them."
        )
    return filled


def _with_bytes(image: ImageFile, files: Mapping[str, bytes]) -> ImageFile:
    if image.sha256 not in files:
        raise ChatError("An image of this conversation is not kept any more; delete its turn, or attach it again.")
    return msgspec.structs.replace(image, data=files[image.sha256])


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
        texts=tuple(
            "\n\n".join(attachment_text(file) for file in each.attachments if file.kind != "image") for each in shown
        ),
        template=template,
    )


def _says_something(message: Message) -> bool:
    return bool(message.content.strip() or message.attachments)
