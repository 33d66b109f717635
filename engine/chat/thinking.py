"""Separates the thought from the answer in a model's streamed text.

A piece of the stream may end anywhere, even inside a tag.

A model thinks at the beginning of its text, between the two tags of its family. A tag later in an answer is plain text.
The text must contain the tags. Some of them are control tokens, which the request must name in `Generate.marks`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

TEMPLATE_KEY = "tokenizer.chat_template"
"""The GGUF key of the chat template."""


class ThinkTags(NamedTuple):
    """The tags that a model writes around its thought (reasoning), such as `<think>` and `</think>`."""

    begin: str
    end: str


THINK = ThinkTags("<think>", "</think>")
FAMILIES: tuple[ThinkTags, ...] = (
    THINK,
    ThinkTags("<thinking>", "</thinking>"),
    ThinkTags("<thought>", "</thought>"),
    ThinkTags("<reasoning>", "</reasoning>"),
    ThinkTags("<seed:think>", "</seed:think>"),
    ThinkTags("[THINK]", "[/THINK]"),
    ThinkTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkTags("<|channel|>analysis<|message|>", "<|end|>"),
    ThinkTags("<|channel>thought", "<channel|>"),
)
"""Thinking tags, in this order: Qwen and DeepSeek, three pairs of fine-tuned models, Seed, Mistral, Command, gpt-oss,
Gemma.
"""
SKIPPED = ("<|start|>assistant", "<|channel|>final<|message|>", "<|START_RESPONSE|>")
"""Tags before an answer that are part of neither the answer nor the thought."""
CONTROL_TAGS = frozenset(
    {
        *(text for marks in FAMILIES for text in marks),
        *("<|start|>", "<|channel|>", "<|message|>", "<|channel>", "<|START_RESPONSE|>"),
    }
)
"""Tags that are control tokens in some vocabularies. They are in the text only if the request names them."""

_COMMON = ("<|end|>",)
"""End tags that also occur in templates of models without thoughts (Phi). They count only if the begin tag occurs too.
"""


class Delta(NamedTuple):
    """New text of the thought (`reasoning`) and of the answer (`content`) after one more piece of the model's text."""

    reasoning: str
    content: str


class Splitter:
    """Separates the thought from the answer in the model's text while it is streamed.

    `marks`: tags around the thought; None until a thought begins.
    """

    def __init__(self) -> None:
        self._state: Literal["begin", "thinking", "after", "answer"] = "begin"
        self._held = ""
        self._has_reasoning = False
        self.marks: ThinkTags | None = None

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._state == "thinking"

    @property
    def has_thought(self) -> bool:
        """Whether a thought has begun and ended."""
        return self.marks is not None and not self.is_thinking

    def add(self, text: str) -> Delta:
        """Add a piece of the model's text; return the new text of the thought and the new text of the answer.

        If the end of the piece may be the beginning of a tag, this end is held back until more text comes.
        """
        self._held += text
        reasoning: list[str] = []
        content: list[str] = []
        # One piece may contain several transitions, such as the end of the thought and the answer.
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
        """Return the text that was held back as a possible tag. Call it when the answer has ended."""
        held, self._held = self._held, ""
        if self._state == "thinking":
            return Delta(self._lead(held.rstrip()), "")
        return Delta("", held.lstrip() if self._state == "after" else held)

    def _begin(self) -> None:
        """Decide whether the text begins with a thought or with the answer."""
        text = self._held.lstrip()
        for marks in FAMILIES:
            if text.startswith(marks.begin):
                self._state, self.marks, self._held = "thinking", marks, text[len(marks.begin) :]
                return
        for skipped in SKIPPED:
            if text.startswith(skipped):
                self._state, self._held = "after", text[len(skipped) :]
                return
        # The text may still become a tag; wait for more.
        if any(mark.startswith(text) for mark in (*SKIPPED, *(marks.begin for marks in FAMILIES))):
            return
        if self._state == "after":
            self._held = text
        self._state = "answer"

    def _think(self) -> str:
        """Return the new text of the thought, without white space at the thought's ends.

        Text at the end that may be the beginning of the end tag is held back.
        """
        assert self.marks is not None
        index = self._held.find(self.marks.end)
        if index >= 0:
            thought = self._lead(self._held[:index].rstrip())
            self._held = self._held[index + len(self.marks.end) :]
            self._state = "after"
            return thought
        # The end of the text may be the beginning of the end tag.
        clear = len(self._held) - overlap(self._held, self.marks.end)
        thought = self._held[:clear].rstrip()
        self._held = self._held[len(thought) :]
        return self._lead(thought)

    def _lead(self, text: str) -> str:
        """Return `text`, a piece of the thought, without white space at the thought's beginning."""
        # Models write line breaks between the tag and the thought.
        if not self._has_reasoning:
            text = text.lstrip()
        self._has_reasoning = self._has_reasoning or bool(text)
        return text


def think_tags_of(template: str) -> ThinkTags | None:
    """Return the thinking tags that a chat template uses; None if it uses none."""
    found = [
        marks for marks in FAMILIES if marks.end in template and (marks.end not in _COMMON or marks.begin in template)
    ]
    return min(found, key=lambda marks: template.index(marks.end), default=None)


def begun_answer(reasoning: str, content: str, marks: ThinkTags | None, *, thinking: bool = False) -> str:
    """Return the text from which a model continues an answer.

    `reasoning`, `content`: the thought and the answer so far.
    `thinking`: whether the model continues the incomplete thought. If not, the text closes the thought, and the model
    writes the answer after it ("Answer now").
    """
    # Without a thought the answer is the whole text.
    if not reasoning and not thinking:
        return content
    begin, end = marks or THINK
    return f"{begin}\n{reasoning}" if thinking else f"{begin}\n{reasoning}\n{end}\n\n{content}"


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `mark`."""
    # The longest first. A whole tag is no overlap: the caller has searched for it.
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
