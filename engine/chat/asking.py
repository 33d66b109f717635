"""Builds model requests from the messages of a conversation.

It also finds the tokens of earlier answers in a tokenised prompt, so that their recorded probabilities can be shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from engine.base.errors import ChatError
from engine.base.texts import fenced
from engine.base.values import replace
from engine.chat.call_styles import CALL_TAGS
from engine.chat.message import Attachment, Message
from engine.chat.thinking import CONTROL_TAGS, FAMILIES
from engine.chat.tools import NO_TOOLS, ToolUse, in_order_of_calls, is_whole
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.runtime.protocol.messages import TokenChoice
from engine.runtime.protocol.requests import ChatMessage, Generate, ImageFile, MediaFile, SoundFile, TemplateInput

MAX_SENT_BYTES = 96 << 20
"""Largest size in bytes of all images and sounds of one request together.

The limit is low because several copies of these bytes are in memory at the same time.
"""
SYSTEM = ""
"""Key of the system prompt in mappings by message id."""
HEAD_CHARACTERS = 32
"""Length in characters of the beginning of a message, by which the message is found in the text of a prompt."""


def chat_messages(system: str, shown: Sequence[Message], tools: ToolUse = NO_TOOLS) -> tuple[ChatMessage, ...]:
    """Return the messages of the prompt in the form that the chat template gets, in their order.

    `system`: the system prompt; empty if there is none.
    `shown`: the messages of the conversation that are in the prompt.
    `tools`: the tools, whose template determines the form of calls and results.
    """
    return tuple(messages_by_id(system, shown, tools).values())


def messages_by_id(system: str, shown: Sequence[Message], tools: ToolUse = NO_TOOLS) -> Mapping[str, ChatMessage]:
    """Return the messages of the prompt in the form that the chat template gets, by message id.

    The system prompt comes first, with the key `SYSTEM`. Messages contain the text of their attachments. They name
    images and sounds, whose bytes `with_files` adds. Tool calls and results are in a form that the chat template of
    `tools` can write. Thoughts are left out. Questions without an answer are left out too, except the last one, because
    templates expect alternating questions and answers.

    `system`: the system prompt; empty if there is none.
    `shown`: the messages of the conversation that are in the prompt.
    """
    found = {SYSTEM: ChatMessage("system", system)} if system.strip() else {}
    # Results in the order of their calls: some templates write no ids, so that only the order tells them apart.
    shown = in_order_of_calls(shown)
    names: dict[str, str] = {}
    for index, message in enumerate(shown):
        follower = shown[index + 1] if index + 1 < len(shown) else None
        if message.role != "tool":
            names = {call.id: call.name for call in message.calls}
        unanswered = message.role == "user" and follower is not None and not _says_something(follower)
        # Many templates raise an error unless user and assistant alternate, so unanswered questions are left out.
        if _says_something(message) and not unanswered:
            found[message.id] = _chat_message(message, names)
    adapted = tools.messages(tuple(found.values()))
    # Tools that the template does not know may need a system prompt of their own.
    ids = tuple(found) if len(adapted) == len(found) else (SYSTEM, *found)
    return dict(zip(ids, adapted, strict=True))


def _chat_message(message: Message, names: Mapping[str, str]) -> ChatMessage:
    """Return one message as the chat template gets it. `names`: function names of earlier calls by call id."""
    text, media = message_text(message), media_of(message)
    if message.role == "tool":
        # A result of an unknown call, as in some imported conversations, has no place in any template.
        if message.call_id not in names:
            return ChatMessage("user", text, media)
        return ChatMessage("tool", text, media, call_id=message.call_id, name=names[message.call_id])
    # A call that the end of the answer has cut off cannot be read by templates.
    return ChatMessage(message.role, text, media, calls=tuple(filter(is_whole, message.calls)))


def message_text(message: Message) -> str:
    """Return the text of a message's attachments, followed by its own text."""
    return "\n\n".join([*texts_of(message), message.content]).strip("\n")


def media_of(message: Message) -> tuple[MediaFile, ...]:
    """Return the images and sounds of a message, without their bytes."""
    return tuple(file for each in message.attachments if (file := media_file(each)) is not None)


def media_file(attachment: Attachment) -> MediaFile | None:
    """Return an attached image or sound, without its bytes; None if the attachment is text."""
    match attachment.kind:
        case "image":
            return ImageFile(sha256=attachment.sha256, width_px=attachment.width_px, height_px=attachment.height_px)
        case "audio":
            return SoundFile(sha256=attachment.sha256, length_ms=attachment.length_ms)
    return None


def names_of_media(messages: Iterable[ChatMessage]) -> tuple[str, ...]:
    """Return the keys of all images and sounds in the messages: the SHA-256 of their bytes."""
    return tuple(dict.fromkeys(file.sha256 for message in messages for file in message.media))


def with_files(messages: Iterable[ChatMessage], files: Mapping[str, bytes]) -> tuple[ChatMessage, ...]:
    """Return the messages with the bytes of their images and sounds.

    `files`: bytes by SHA-256.

    Raises:
        ChatError: a file is missing, or the files together are too large for one request.
    """
    filled = tuple(
        replace(message, media=tuple(_with_bytes(file, files) for file in message.media)) for message in messages
    )
    if sum(len(file.data) for message in filled for file in message.media) > MAX_SENT_BYTES:
        raise ChatError(
            f"The images and sounds of this conversation are larger than {MAX_SENT_BYTES >> 20} MiB in total; start a"
            " new conversation, or branch before some of them."
        )
    return filled


def _with_bytes(file: MediaFile, files: Mapping[str, bytes]) -> MediaFile:
    if file.sha256 not in files:
        what = "A sound" if isinstance(file, SoundFile) else "An image"
        raise ChatError(f"{what} of this conversation is no longer saved; delete its message, or attach it again.")
    return replace(file, data=files[file.sha256])


def texts_of(message: Message) -> list[str]:
    """Return the texts of a message's attachments that are neither images nor sounds."""
    return [attachment_text(each) for each in message.attachments if media_file(each) is None]


def attachment_text(attachment: Attachment) -> str:
    """Return the text of an attachment for the prompt, in a code block whose fence is longer than any in the text."""
    if not attachment.text:
        return f"File: {attachment.name} (not text)"
    return f"File: {attachment.name}\n{fenced(attachment.text)}"


def answer_request(
    messages: Iterable[ChatMessage],
    settings: SamplingSettings,
    *,
    begun: str = "",
    template: str = "",
    tools: ToolUse = NO_TOOLS,
) -> Generate:
    """Return the request for an answer.

    `begun`: text from which the model continues (`thinking.begun_answer`); empty for a new answer.
    `template`: chat template; empty for the model's own.
    """
    return Generate(
        messages=tuple(messages),
        sampling=settings,
        template=template,
        template_input=TemplateInput(tools=tools.definitions),
        begun=begun,
        thinking=tuple((marks.begin, marks.end) for marks in FAMILIES),
        marks=tuple(sorted({*CONTROL_TAGS, *CALL_TAGS} if tools.tools else CONTROL_TAGS)),
    )


def choices_in_prompt(pieces: Sequence[str], shown: Sequence[Message]) -> Mapping[int, TokenChoice]:
    """Return the recorded probabilities for the tokens of earlier answers in a prompt, by index in `pieces`.

    The prompt is tokenised as a whole, so its tokens may differ from those that the model generated. A recorded token
    is used only if a token of the prompt begins at the same character and has the same text.

    `pieces`: text of each token of the prompt.
    `shown`: the messages from which the prompt was made.
    """
    text = "".join(pieces)
    begins = zip(pieces, accumulate(map(len, pieces), initial=0), strict=False)
    numbers = {begin: number for number, (piece, begin) in enumerate(begins) if piece}
    found: dict[int, TokenChoice] = {}
    after = 0
    for message in shown:
        choices = _choices_of_content(message)
        words = "".join(choice.text for choice in choices) or message_text(message)
        head = words.strip()[: min(HEAD_CHARACTERS, len(message_text(message).strip()))]
        begin = text.find(head, after) if head else -1
        if begin < 0:
            continue
        # Messages are in the prompt's order: the next one cannot match inside this one.
        after = begin + len(head)
        # A template may remove white space around an answer.
        index = begin - (len(words) - len(words.lstrip()))
        for choice in choices:
            if index >= begin and not text.startswith(choice.text, index):
                break
            number = numbers.get(index, -1)
            if number >= 0 and pieces[number] == choice.text:
                found[number] = choice
            index += len(choice.text)
    return found


def _choices_of_content(message: Message) -> tuple[TokenChoice, ...]:
    """Return the recorded tokens of an answer without those of its thought, because a prompt contains no thoughts."""
    if not message.reasoning:
        return message.choices
    text = "".join(choice.text for choice in message.choices)
    begin = text.find(message.content.strip()[:HEAD_CHARACTERS], len(message.reasoning))
    if begin < 0:
        return ()
    ends = accumulate(len(choice.text) for choice in message.choices)
    return tuple(choice for choice, end in zip(message.choices, ends, strict=True) if end > begin)


def _says_something(message: Message) -> bool:
    # The result of a tool may be empty, but its call must have one.
    is_result = message.role == "tool" and bool(message.call_id)
    return bool(message.content.strip() or message.attachments) or is_result or any(map(is_whole, message.calls))
