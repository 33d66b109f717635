"""From what is shown of a conversation to what a model is asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from engine.chats.message import Attachment, Message
from engine.chats.thinking import CONTROL_MARKS, FAMILIES
from engine.protocol.messages import ChatMessage, CountTokens, Generate
from engine.settings.sampling_settings import SamplingSettings

SYSTEM = ""
"""Stands for the system prompt where there are ids of messages."""


def chat_messages(system: str, shown: Sequence[Message]) -> tuple[ChatMessage, ...]:
    """Return what a template is given, as `messages_by_id` has it."""
    return tuple(messages_by_id(system, shown).values())


def messages_by_id(system: str, shown: Sequence[Message]) -> Mapping[str, ChatMessage]:
    """Return what a template is given, by message: the system prompt, then what was said, with text of attachments.

    Thoughts are left out, and questions whose answer never came: templates want question and answer in turns.
    """
    found = {SYSTEM: ChatMessage("system", system)} if system.strip() else {}
    for place, message in enumerate(shown):
        follower = shown[place + 1] if place + 1 < len(shown) else None
        unanswered = message.role == "user" and follower is not None and not _says_something(follower)
        if _says_something(message) and not unanswered:
            role = "user" if message.role == "tool" else message.role
            found[message.id] = ChatMessage(role, message_text(message))
    return found


def message_text(message: Message) -> str:
    """Return a message with the text of what is attached to it, that first."""
    return "\n\n".join([*map(attachment_text, message.attachments), message.content]).strip("\n")


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
        texts=tuple("\n\n".join(map(attachment_text, each.attachments)) for each in shown),
        template=template,
    )


def _says_something(message: Message) -> bool:
    return bool(message.content.strip() or message.attachments)
