"""Tokens of earlier answers are found in a prompt where they say the same at the same place, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from engine.chats.asking import choices_in_prompt
from engine.chats.message import Message
from engine.protocol.messages import TokenChoice


def answer(pieces: Sequence[str], *, thought: str = "", shown: str | None = None) -> Message:
    """An answer that was written with these tokens."""
    text = "".join(pieces).removesuffix("<end>")
    content = text.partition("</think>")[2] if thought else text
    chosen = tuple(TokenChoice(piece, 0.5, ((piece, 0.5),)) for piece in pieces)
    return Message(
        id="a",
        role="assistant",
        content=content.strip() if shown is None else shown,
        reasoning=thought,
        choices=chosen,
    )


def question(text: str) -> Message:
    return Message(id="q", role="user", content=text)


def found(prompt: Sequence[str], *shown: Message) -> dict[int, str]:
    return {place: choice.text for place, choice in choices_in_prompt(prompt, shown).items()}


def test_an_answer_is_found_behind_its_question() -> None:
    prompt = ["<s>", "the", " quay", "<a>", "the", " quay", "<end>", "<u>"]
    path = (question("the quay"), answer(["the", " quay", "<end>"]))
    assert found(prompt, *path) == {4: "the", 5: " quay", 6: "<end>"}
    assert found(prompt, question("the quay"), question("the quay")) == {}


def test_thoughts_are_in_no_prompt() -> None:
    pieces = ["<think>", "Hello", " there", "</think>", "\n\n", "Hello", "!", "<end>"]
    assert found(["<u>", "Hi", "<a>", "Hello", "!", "</s>"], question("Hi"), answer(pieces, thought="Hello there")) == {
        3: "Hello",
        4: "!",
    }


def test_other_tokens_are_told_from_those_of_the_answer() -> None:
    said = answer(["un", "load", "ed", " it", " all"])
    assert found(["<a>", "unload", "ed", " it", " all"], said) == {2: "ed", 3: " it", 4: " all"}
    # what a template changed ends it
    assert found(["<a>", "un", "load", "ing", " it"], said) == {}
    assert found(["<a>", "un", "load", "ed", " i", "t all"], said) == {1: "un", 2: "load", 3: "ed"}


def test_spaces_that_a_template_leaves_out_move_nothing() -> None:
    assert found(["<a>", "Yes", ".", "<u>"], answer([" ", " Yes", "."])) == {2: "."}
    assert found(["<a>", "Yes", ".", "<u>"], answer(["\n", "Yes", "."])) == {1: "Yes", 2: "."}


def test_halves_of_characters_are_found() -> None:
    pieces = ["\ufffd", "\ufffd", " ok"]
    assert found(["<a>", *pieces], answer(pieces, shown="\N{GRINNING FACE} ok")) == {1: "\ufffd", 2: "\ufffd", 3: " ok"}


WORDS = st.lists(st.sampled_from(["a", "b", " ", "ab", "\n", "", "c"]), max_size=12)


@given(WORDS, st.lists(WORDS, max_size=4))
def test_what_is_found_says_the_same(prompt: list[str], answers: list[list[str]]) -> None:
    for place, text in found(prompt, *map(answer, answers)).items():
        assert prompt[place] == text
