"""Thinking and answer told apart in what a model writes, as it comes: however the text is cut, the result is the same.

A model thinks at the beginning of what it writes, between two marks of its family; a mark later in an answer is text.
The text has to have the marks in it: `Generate.marks` asks for that.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

TEMPLATE_KEY = "tokenizer.chat_template"
"""Under which a model's file has its chat template."""


class Marks(NamedTuple):
    """What a thought stands between."""

    begin: str
    end: str


THINK = Marks("<think>", "</think>")
FAMILIES: tuple[Marks, ...] = (
    THINK,
    Marks("<thinking>", "</thinking>"),
    Marks("<thought>", "</thought>"),
    Marks("<reasoning>", "</reasoning>"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    Marks("<|channel|>analysis<|message|>", "<|end|>"),
    Marks("<|channel>thought", "<channel|>"),
)
"""Qwen and DeepSeek; others by hand of their users; Seed; Mistral; Command; gpt-oss; Gemma."""
SKIPPED = ("<|start|>assistant", "<|channel|>final<|message|>", "<|START_RESPONSE|>")
"""What stands before an answer and belongs to neither."""
CONTROL_MARKS = frozenset(
    {
        *(text for marks in FAMILIES for text in marks),
        *("<|start|>", "<|channel|>", "<|message|>", "<|channel>", "<|START_RESPONSE|>"),
    }
)
"""What these are made of where a vocabulary has them as tokens that are else mute."""

_COMMON = ("<|end|>",)
"""Ends of thoughts that are ends of whole messages with other families (Phi)."""


class Told(NamedTuple):
    """What came of a piece of text: more of the thought, more of the answer."""

    reasoning: str
    content: str


class Splitter:
    """Takes text piece by piece. `marks` are those that were found, None where nothing is thought."""

    def __init__(self) -> None:
        self._state: Literal["begin", "thinking", "after", "answer"] = "begin"
        self._held = ""
        self._has_reasoning = False
        self.marks: Marks | None = None

    @property
    def is_thinking(self) -> bool:
        """Whether a thought is under way."""
        return self._state == "thinking"

    @property
    def has_thought(self) -> bool:
        """Whether a thought is at its end."""
        return self.marks is not None and not self.is_thinking

    def add(self, text: str) -> Told:
        """Take more text; what may be the beginning of a mark waits for the rest."""
        self._held += text
        reasoning: list[str] = []
        content: list[str] = []
        while self._held:
            state, held = self._state, len(self._held)
            if state == "thinking":
                reasoning.append(self._think())
            elif state == "answer":
                content.append(self._held)
                self._held = ""
            else:
                self._begin()
            if state == self._state and held == len(self._held):
                break
        return Told("".join(reasoning), "".join(content))

    def rest(self) -> Told:
        """Return what was held back, at the end of the text."""
        held, self._held = self._held, ""
        if self._state == "thinking":
            return Told(self._lead(held.rstrip()), "")
        return Told("", held.lstrip() if self._state == "after" else held)

    def _begin(self) -> None:
        """Find out whether a thought begins, or the answer."""
        text = self._held.lstrip()
        for marks in FAMILIES:
            if text.startswith(marks.begin):
                self._state, self.marks, self._held = "thinking", marks, text[len(marks.begin) :]
                return
        for skipped in SKIPPED:
            if text.startswith(skipped):
                self._state, self._held = "after", text[len(skipped) :]
                return
        if any(mark.startswith(text) for mark in (*SKIPPED, *(marks.begin for marks in FAMILIES))):
            return
        if self._state == "after":
            self._held = text
        self._state = "answer"

    def _think(self) -> str:
        """Return what is clear of the thought. White space at its ends is no part of it."""
        assert self.marks is not None
        place = self._held.find(self.marks.end)
        if place >= 0:
            told = self._lead(self._held[:place].rstrip())
            self._held = self._held[place + len(self.marks.end) :]
            self._state = "after"
            return told
        clear = len(self._held) - _overlap(self._held, self.marks.end)
        told = self._held[:clear].rstrip()
        self._held = self._held[len(told) :]
        return self._lead(told)

    def _lead(self, text: str) -> str:
        """Take white space off the beginning of the thought."""
        if not self._has_reasoning:
            text = text.lstrip()
        self._has_reasoning = self._has_reasoning or bool(text)
        return text


def marks_of(template: str) -> Marks | None:
    """Return what thoughts stand between by a model's chat template; None where it knows none."""
    found = [
        marks for marks in FAMILIES if marks.end in template and (marks.end not in _COMMON or marks.begin in template)
    ]
    return min(found, key=lambda marks: template.index(marks.end), default=None)


def begun_answer(reasoning: str, content: str, marks: Marks | None, *, thinking: bool = False) -> str:
    """Return what a model had written, for it to go on from there.

    `thinking`: the thought was not at its end. Without it an empty answer begins after the thought: "answer now".
    """
    if not reasoning and not thinking:
        return content
    begin, end = marks or THINK
    return f"{begin}\n{reasoning}" if thinking else f"{begin}\n{reasoning}\n{end}\n\n{content}"


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that `mark` begins with."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
