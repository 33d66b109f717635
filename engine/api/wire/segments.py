"""Divides an answer into segments, each a thought, a text or a tool call.

Streams of Anthropic's API and the Responses API report where each segment begins and ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from msgspec import Struct

from engine.api.wire.answer import AnswerDelta, WrittenAnswer
from engine.chat.tool_calls import CallDelta

Kind = Literal["reasoning", "content", "call"]


class Segment(Struct):
    """One segment of an answer: a thought, a text or a tool call.

    `number`: index of the segment in the answer.
    `text`: the text of the segment; the arguments if it is a call.
    `id`, `name`: id of a call and name of its function; else empty.
    """

    number: int
    kind: Kind
    text: str = ""
    id: str = ""
    name: str = ""


class Step(NamedTuple):
    """One step of a streamed answer: a segment begins, gets more text, or ends. `text`: the added text."""

    verb: Literal["begin", "add", "end"]
    segment: Segment
    text: str = ""


class Segments:
    """Divides one streamed answer into segments. A new segment begins when the answer changes between thought, text and
    tool calls, and with each further call.

    `all`: the segments so far; only the last one can still get more text.
    """

    def __init__(self) -> None:
        self.all: list[Segment] = []
        self._is_open = False

    def take(self, part: AnswerDelta) -> list[Step]:
        """Add the next part of the answer; return the steps it causes: segments that begin, get text, or end."""
        steps: list[Step] = []
        if part.reasoning:
            steps += self._add("reasoning", part.reasoning)
        if part.content:
            steps += self._add("content", part.content)
        for call in part.calls:
            steps += self._add("call", call.arguments, call)
        return steps

    def end(self) -> list[Step]:
        """End the last segment; return the step "end" in a list, which is empty if the segment has ended already."""
        if not self._is_open:
            return []
        self._is_open = False
        return [Step("end", self.all[-1])]

    def _add(self, kind: Kind, text: str, call: CallDelta | None = None) -> Iterator[Step]:
        is_new = not self._is_open or self.all[-1].kind != kind or (call is not None and bool(call.name))
        if is_new:
            yield from self.end()
            segment = Segment(len(self.all), kind)
            if call is not None:
                segment.id, segment.name = call.id, call.name
            self.all.append(segment)
            self._is_open = True
            yield Step("begin", segment)
        if text:
            self.all[-1].text += text
            yield Step("add", self.all[-1], text)


def segments_of(answer: WrittenAnswer) -> list[Segment]:
    """Return the segments of a whole answer."""
    found: list[Segment] = []
    if answer.reasoning:
        found.append(Segment(len(found), "reasoning", answer.reasoning))
    if answer.content:
        found.append(Segment(len(found), "content", answer.content))
    for call in answer.calls:
        found.append(Segment(len(found), "call", call.arguments, call.id, call.name))
    return found
