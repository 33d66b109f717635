"""Conversion of stored messages to the values that the chat shows, with a line on the speed of each answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from app.chats.attacher import attachment_size
from engine.base.language import tr, tr_count
from engine.base.texts import fenced, show
from engine.base.units import format_count
from engine.chat.conversation import result_key
from engine.chat.exports import copied_text
from engine.chat.message import Message, Timings
from engine.chat.tools import answer_waiting_for_results, missing_results, pretty_arguments
from engine.chat.tree import MessageTree
from engine.runtime.session.drafts import draft_words
from widgets.chat.shown import Role, ShownCall, ShownImage, ShownMessage

ENDINGS = {
    "stopped": tr("Stopped. The partial answer was kept."),
    "length": tr("The answer reached the length limit. “Continue” makes it longer."),
    "context_full": tr("Stopped because the context is full."),
    "repetition": tr(
        "Stopped because the answer kept repeating itself. A repeat penalty of 1.1 or a higher temperature helps."
    ),
}
NO_RESULTS: Mapping[str, str] = MappingProxyType({})
INTERRUPTED = tr("Layerdeck ended during this answer. The part that arrived was kept.")
NEVER_BEGUN = tr("Layerdeck ended before an answer came.")


def shown_messages(
    tree: MessageTree,
    open_message: str | None,
    left_out: Collection[str] = (),
    results: Mapping[str, str] = NO_RESULTS,
) -> tuple[ShownMessage, ...]:
    """Return the messages on the shown path of a tree, as the chat shows them.

    `open_message`: id of the answer that is being written, or None. `left_out`: ids of messages that the prompt omits.
    `results`: results that people have typed for tool calls but not sent, by the key that `result_key` returns.
    """
    messages = (message for message in tree.path if message.role != "system")
    return tuple(shown_message(tree, message, open_message, left_out, results) for message in messages)


def shown_message(
    tree: MessageTree,
    message: Message,
    open_message: str | None,
    left_out: Collection[str] = (),
    results: Mapping[str, str] = NO_RESULTS,
) -> ShownMessage:
    """Return one message of a tree, as the chat shows it.

    `open_message`: id of the answer that is being written, or None. `left_out`: ids of messages that the prompt omits.
    `results`: results that people have typed for tool calls but not sent, by the key that `result_key` returns.
    """
    versions = tree.versions(message.id)
    # A result of a call that is not there has no name; such messages were imported.
    is_result = message.role == "tool"
    role: Role = "user" if message.role == "user" else "tool" if is_result else "assistant"
    is_open = message.id == open_message
    return ShownMessage(
        id=message.id,
        role=role,
        speaker=_speaker(tree, message),
        # In a fence, so that no result is taken for Markdown.
        text=fenced(message.content) if is_result and message.content else message.content,
        thinking=message.reasoning,
        thinking_note=thinking_note(message, is_open=is_open),
        note="" if is_open else answer_note(message),
        details="" if is_open else answer_details(message),
        is_error=not is_open and _has_failed(message),
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
        # An answer that ended by itself has nothing to continue.
        can_continue=role == "assistant"
        and message.stop_reason != "end_of_text"
        and bool(message.content or message.reasoning)
        and not message.calls,
        is_left_out=message.id in left_out,
        calls=_shown_calls(tree, message, is_open, results),
        source=copied_text(message) if message.calls or is_result else "",
        can_answer=is_result and message.id == tree.leaf and not missing_results(tree.path),
    )


def _speaker(tree: MessageTree, message: Message) -> str:
    match message.role:
        case "user":
            return tr("You")
        case "tool":
            answer = answer_waiting_for_results(tree.path_to(message.parent))
            calls = () if answer is None else answer.calls
            name = next((call.name for call in calls if call.id == message.call_id), "")
            same = [call.id for call in calls if call.name == name]
            if len(same) > 1:
                # Parallel calls of one tool are told apart by their order.
                return tr("Result {number} of {name}", number=same.index(message.call_id) + 1, name=show(name))
            return tr("Result of {name}", name=show(name)) if name else tr("Tool result")
    return message.model or tr("Model")


def _shown_calls(
    tree: MessageTree, message: Message, is_open: bool, results: Mapping[str, str]
) -> tuple[ShownCall, ...]:
    wanted: set[str] = set()
    if message.calls and not is_open and answer_waiting_for_results(tree.path) is message:
        wanted = {call.id for call in missing_results(tree.path)}
    return tuple(
        ShownCall(
            call.id,
            show(call.name),
            pretty_arguments(call),
            call.id in wanted,
            results.get(result_key(message.id, call.id), ""),
        )
        for call in message.calls
    )


def _has_failed(message: Message) -> bool:
    """Return whether an answer ended with an error, or did not begin before the program ended."""
    if message.state in ("failed", "interrupted") and message.note:
        return True
    return message.state in ("interrupted", "writing") and _never_began(message)


def _never_began(message: Message) -> bool:
    return message.role == "assistant" and not (message.content or message.reasoning or message.calls)


def answer_note(message: Message) -> str:
    """Return the line of text that the chat shows below `message`.

    Below an answer it is the error, or else speed, number of tokens and reason of the end. Below any other message it
    is the note that is stored with the message.
    """
    if message.role != "assistant" or message.state == "failed":
        return message.note
    parts = [] if message.timings is None else answer_speed_words(message.timings)
    if message.state in ("interrupted", "writing"):
        # A message that is still "writing" in the database was left so by a window that was killed.
        return " · ".join([message.note or (NEVER_BEGUN if _never_began(message) else INTERRUPTED), *parts])
    ending = ENDINGS.get(message.stop_reason, "")
    return " · ".join(part for part in (*parts, ending, message.note) if part)


def answer_details(message: Message) -> str:
    """Return the details below an answer as text: prompt processing speed, time to first token, cache use, layout."""
    if message.role != "assistant" or message.state == "failed":
        return ""
    parts = [] if message.timings is None else answer_prompt_words(message.timings)
    return " · ".join([*parts, *([message.layout] if message.layout else [])])


def answer_speed_words(timings: Timings) -> list[str]:
    """Return texts with the generation speed, the number of generated tokens, and the use of a draft in an answer."""
    speed = timings.generation_tokens_per_second
    words = [] if speed is None else [tr("{speed:.1f} tokens/s", speed=speed)]
    number = format_count(timings.generated_tokens)
    tokens = tr_count("{number} token", "{number} tokens", timings.generated_tokens, number=number)
    return [*words, tokens, *draft_words(timings.draft)]


def answer_prompt_words(timings: Timings) -> list[str]:
    """Return texts: prompt processing speed, time to the first token, and number of prompt tokens from the cache."""
    words: list[str] = []
    speed = timings.prompt_tokens_per_second
    if speed is not None:
        words.append(tr("prompt: {speed:.0f} tokens/s", speed=speed))
    if timings.first_token_seconds is not None:
        words.append(tr("first token after {duration}", duration=_duration(timings.first_token_seconds)))
    if timings.cached_tokens:
        words.append(
            tr(
                "{cached_tokens} of {prompt_tokens} prompt tokens from the cache",
                cached_tokens=format_count(timings.cached_tokens),
                prompt_tokens=format_count(timings.prompt_tokens),
            )
        )
    return words


def thinking_note(message: Message, *, is_open: bool) -> str:
    """Return a text with the duration of the model's thinking in `message`, and the length of its reasoning text.

    The result is empty if there is no reasoning text, or while the model still thinks.
    `is_open`: whether the answer is being written.
    """
    timings = message.timings
    if not message.reasoning or (is_open and not message.content):
        return ""
    length = tr("{count} characters", count=format_count(len(message.reasoning)))
    if timings is None:
        return tr("Thoughts · {length}", length=length)
    # Characters are known at once; tokens only if the child has counted them.
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
        else tr("{minutes} min {seconds} s", minutes=int(seconds) // 60, seconds=int(seconds) % 60)
    )
