"""Reasoning and answer are separated in the same way, however the text is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat.thinking import FAMILIES, SKIPPED, Delta, Splitter, ThinkTags, begun_answer, think_tags_of

PARTS = [*(text for marks in FAMILIES for text in marks), *SKIPPED, "a", " ", "\n", "<", "</", "<|", "[", "thin", "é"]


def split(text: str) -> Delta:
    """Return the thought and the answer of a whole text."""
    splitter = Splitter()
    first, rest = splitter.add(text), splitter.rest()
    return Delta(first.reasoning + rest.reasoning, first.content + rest.content)


def in_pieces(text: str, cuts: list[int]) -> tuple[str, str]:
    splitter, places = Splitter(), sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    deltas = [splitter.add(text[begin:end]) for begin, end in pairwise(places)]
    deltas.append(splitter.rest())
    return "".join(each.reasoning for each in deltas), "".join(each.content for each in deltas)


@given(st.lists(st.sampled_from(PARTS), max_size=30).map("".join), st.lists(st.integers(0, 500), max_size=30))
def test_any_cut_gives_the_same(text: str, cuts: list[int]) -> None:
    assert in_pieces(text, cuts) == split(text) == in_pieces(text, list(range(len(text))))


@given(st.text(), st.lists(st.integers(0, 500), max_size=10))
def test_an_answer_without_thought_is_told_as_it_is(text: str, cuts: list[int]) -> None:
    if not text.lstrip().startswith(("<", "[")):
        assert in_pieces(text, cuts) == ("", text)


@pytest.mark.parametrize("marks", FAMILIES, ids=lambda marks: marks.begin)
def test_every_family_is_told_apart(marks: ThinkTags) -> None:
    assert split(f"{marks.begin}\nhm, <b> \n{marks.end}\n\nYes {marks.begin}") == ("hm, <b>", f"Yes {marks.begin}")
    assert split(f"{marks.begin}hm") == ("hm", "")
    splitter = Splitter()
    splitter.add(marks.begin)
    assert (splitter.is_thinking, splitter.marks) == (True, marks)
    splitter.add("x" + marks.end + "y")
    assert not splitter.is_thinking


def test_channels_before_an_answer_are_no_part_of_it() -> None:
    text = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Hello"
    assert split(text) == ("Think.", "Hello")


def test_what_was_begun_goes_on_where_it_was() -> None:
    marks = ThinkTags("<think>", "</think>")
    assert split(begun_answer("hm", "Yes", marks) + " and no") == ("hm", "Yes and no")
    assert split(begun_answer("hm", "", marks, thinking=True) + ", so</think>Yes") == ("hm, so", "Yes")
    assert split(begun_answer("hm", "", None) + "Yes") == ("hm", "Yes")
    assert begun_answer("", "Yes", marks) == "Yes"


def test_marks_are_found_in_a_template() -> None:
    assert think_tags_of("{{ m }}[THINK]x[/THINK]") == ThinkTags("[THINK]", "[/THINK]")
    assert think_tags_of("plain") is None
    assert think_tags_of("<|user|>{{ m }}<|end|><|assistant|>") is None, "ends of messages are not ends of thoughts"
    channels = ThinkTags("<|channel|>analysis<|message|>", "<|end|>")
    assert think_tags_of("<|start|>assistant<|channel|>analysis<|message|>{{ m }}<|end|>") == channels


def test_a_long_thought_takes_no_long_time_in_small_pieces() -> None:
    splitter = Splitter()
    splitter.add("<think>")
    thought = "".join(splitter.add("word ").reasoning for _ in range(20_000))
    assert len(thought) >= 20_000 * 5 - 10
