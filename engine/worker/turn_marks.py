"""Where in a prompt another one is likely to part from it: before its last question, behind it, and at its end."""

from __future__ import annotations

from collections.abc import Sequence

from engine.protocol.messages import ChatMessage
from engine.worker.loaded_context import LoadedContext
from engine.worker.text import tokenize

END_TOKENS = 4
"""The last tokens of a text may become others when it goes on."""
SEAM_TOKENS = 1
"""The same where a template's marks and what people wrote meet."""
LEAST_QUESTION = 16
"""In tokens: behind a shorter question it is not worth another mark."""


def turn_marks(loaded: LoadedContext, text: str, messages: Sequence[ChatMessage], count: int) -> tuple[int, ...]:
    """Return the marks of a prompt of `count` tokens, in tokens and ascending; none where the memory can be cut back.

    They are near the places meant and may be anywhere: what is read is the same.
    """
    if not loaded.needs_checkpoints:
        return ()
    question = next((each.content.strip() for each in reversed(messages) if each.role == "user"), "")
    begin = text.rfind(question) if question else -1
    if begin < 0:
        return _within(count, [count - END_TOKENS])
    end = begin + len(question)
    behind = len(tokenize(loaded, text[end:], add_special=False))
    asked = len(tokenize(loaded, question, add_special=False))
    marks = [count - behind - asked - SEAM_TOKENS]
    if asked >= LEAST_QUESTION:
        marks.append(count - behind - SEAM_TOKENS)
    return _within(count, marks)


def _within(count: int, marks: Sequence[int]) -> tuple[int, ...]:
    return tuple(mark for mark in marks if 0 < mark < count)
