"""Messages of a tree as the chat shows them, with words for what an answer took and how it ended."""

from __future__ import annotations

from app.chats.attacher import attachment_size
from engine.base.language import tr
from engine.chat.message import Message, Timings
from engine.chat.tree import MessageTree
from widgets.chat.shown import Role, ShownImage, ShownMessage
from widgets.common.counts import format_count

ENDINGS = {
    "stopped": tr("Stopped; what came is kept."),
    "length": tr("The longest answer that was allowed ended here; Continue goes on."),
    "context_full": tr("The context was full; what came is kept."),
}
INTERRUPTED = tr("The program ended in the middle of this answer; what had come is kept.")


def shown_messages(tree: MessageTree, open_message: str | None) -> tuple[ShownMessage, ...]:
    """Return the path that is shown."""
    return tuple(shown_message(tree, message, open_message) for message in tree.path if message.role != "system")


def shown_message(tree: MessageTree, message: Message, open_message: str | None) -> ShownMessage:
    """Return a message with what there is to say of it."""
    versions = tree.versions(message.id)
    role: Role = "user" if message.role == "user" else "assistant"
    is_open = message.id == open_message
    return ShownMessage(
        id=message.id,
        role=role,
        speaker=tr("You") if role == "user" else message.model or tr("Model"),
        text=message.content,
        thinking=message.reasoning,
        thinking_note=thinking_note(message, is_open=is_open),
        note="" if is_open else answer_note(message),
        is_error=not is_open and bool(message.note) and message.state in ("failed", "interrupted"),
        version=versions.index(message.id) + 1,
        versions=len(versions),
        is_open=is_open,
        files=", ".join(
            f"{each.name} ({attachment_size(each)})" for each in message.attachments if each.kind != "image"
        ),
        images=tuple(
            ShownImage(each.sha256, each.name, each.width_px, each.height_px)
            for each in message.attachments
            if each.kind == "image"
        ),
        is_pinned=message.pinned,
        has_choices=bool(message.choices),
        can_continue=role == "assistant"
        and message.stop_reason != "end_of_text"
        and bool(message.content or message.reasoning),
    )


def answer_note(message: Message) -> str:
    """Return what is said below an answer: what went wrong, or what it took."""
    if message.role != "assistant":
        return message.note
    if message.state == "failed":
        return message.note
    parts = timing_words(message.timings) if message.timings is not None else []
    if message.layout:
        parts.append(message.layout)
    if message.state in ("interrupted", "writing"):
        return " · ".join([message.note or INTERRUPTED, *parts])
    if message.stop_reason == "stopped":
        parts.append(tr("stopped, what came is kept"))
    elif message.stop_reason in ENDINGS:
        parts.append(ENDINGS[message.stop_reason])
    return " · ".join([*parts, *([message.note] if message.note else [])])


def timing_words(timings: Timings) -> list[str]:
    """Return tokens, speeds and the time to the first token."""
    words: list[str] = []
    generation, prompt = timings.generation_tokens_per_second, timings.prompt_tokens_per_second
    if generation is not None:
        words.append(tr("{generation:.1f} tok/s", generation=generation))
    if prompt is not None:
        words.append(tr("prompt {prompt:.0f} tok/s", prompt=prompt))
    words.append(tr("{generated_tokens} tokens", generated_tokens=format_count(timings.generated_tokens)))
    if timings.first_token_seconds is not None:
        words.append(tr("first after {duration}", duration=_duration(timings.first_token_seconds)))
    if timings.cached_tokens:
        words.append(
            tr(
                "{cached_tokens} of {prompt_tokens} read from cache",
                cached_tokens=format_count(timings.cached_tokens),
                prompt_tokens=format_count(timings.prompt_tokens),
            )
        )
    return words


def thinking_note(message: Message, *, is_open: bool) -> str:
    """Return how long was thought and how much, once that is known."""
    timings = message.timings
    if not message.reasoning or (is_open and not message.content):
        return ""
    length = tr("{count} characters", count=format_count(len(message.reasoning)))
    if timings is None:
        return tr("Thoughts · {length}", length=length)
    if timings.thinking_tokens:
        length = tr("{thinking_tokens} tokens", thinking_tokens=format_count(timings.thinking_tokens))
    seconds = timings.thinking_seconds
    return (
        tr("Thoughts · {length}", length=length)
        if seconds is None
        else tr("Thought for {duration} · {length}", duration=_duration(seconds), length=length)
    )


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return (
        f"{seconds:.1f} s"
        if seconds < 60
        else tr("{seconds} min {seconds2} s", seconds=int(seconds) // 60, seconds2=int(seconds) % 60)
    )
