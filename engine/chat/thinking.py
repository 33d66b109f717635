"""Divides the text of a model into its thought and its answer, as it comes: the result does not depend on the pieces.

A model thinks at the beginning of its text, between two marks of its family; a mark later in an answer is text. The
text must contain the marks: `Generate.marks` asks for that.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

TEMPLATE_KEY = "tokenizer.chat_template"
"""Under which a model's file has its chat template."""


class Marks(NamedTuple):
    """The texts before and after a thought."""

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
"""Texts before an answer that belong neither to it nor to the thought."""
CONTROL_MARKS = frozenset(
    {
        *(text for marks in FAMILIES for text in marks),
        *("<|start|>", "<|channel|>", "<|message|>", "<|channel>", "<|START_RESPONSE|>"),
    }
)
"""Control tokens that marks consist of in some vocabularies; they are not part of the text unless asked for."""

_COMMON = ("<|end|>",)
"""Ends of thoughts that end whole messages in other families (Phi)."""


class Delta(NamedTuple):
    """What a piece of text adds to the thought and to the answer."""

    reasoning: str
    content: str


class Splitter:
    """Takes text piece by piece. `marks`: those that were found, None if there is no thought."""

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
        """Whether a thought has ended."""
        return self.marks is not None and not self.is_thinking

    def add(self, text: str) -> Delta:
        """Take more text; what may be the beginning of a mark is held back until there is more."""
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
        return Delta("".join(reasoning), "".join(content))

    def rest(self) -> Delta:
        """Return the text that was held back; nothing follows."""
        held, self._held = self._held, ""
        if self._state == "thinking":
            return Delta(self._lead(held.rstrip()), "")
        return Delta("", held.lstrip() if self._state == "after" else held)

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
        """Return the text that surely belongs to the thought, without white space at its ends."""
        assert self.marks is not None
        place = self._held.find(self.marks.end)
        if place >= 0:
            thought = self._lead(self._held[:place].rstrip())
            self._held = self._held[place + len(self.marks.end) :]
            self._state = "after"
            return thought
        clear = len(self._held) - _overlap(self._held, self.marks.end)
        thought = self._held[:clear].rstrip()
        self._held = self._held[len(thought) :]
        return self._lead(thought)

    def _lead(self, text: str) -> str:
        """Remove white space at the beginning of the thought."""
        if not self._has_reasoning:
            text = text.lstrip()
        self._has_reasoning = self._has_reasoning or bool(text)
        return text


def marks_of(template: str) -> Marks | None:
    """Return the marks around thoughts in a chat template; None if it has none."""
    found = [
        marks for marks in FAMILIES if marks.end in template and (marks.end not in _COMMON or marks.begin in template)
    ]
    return min(found, key=lambda marks: template.index(marks.end), default=None)


def begun_answer(reasoning: str, content: str, marks: Marks | None, *, thinking: bool = False) -> str:
    """Return the text that a model goes on from.

    `thinking`: the thought has not ended. Otherwise an empty answer begins after the thought ("answer now").
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
