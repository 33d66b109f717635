"""Endless repetition is detected early, and similar texts are not taken for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

from engine.runtime.child.generate.repetition import (
    CHECKED_EVERY,
    OTHER_TOKENS,
    PROSE_TOKENS,
    WINDOW,
    RepetitionDetector,
    repeated_periods,
)

POEM = """Row, row, row your boat,
Gently down the stream.
Merrily, merrily, merrily, merrily,
Life is but a dream.

"""
CHORUS = "And the wind blows on and on, and the wind blows on and on,\nover the hill and over the sea.\n"
TABLE = "| {n} | shelf {n} | 0 | 0 | 0 | no | no | no | no | no |\n"


def tokens_of(text: str) -> tuple[list[int], Callable[[Sequence[int]], str]]:
    """Return tokens of a text, one for each word and each other character, and a function that returns their text."""
    words = re.findall(r" ?[A-Za-z]+|.", text, re.DOTALL)
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    names = list(numbers)
    return [numbers[word] for word in words], lambda tokens: "".join(names[token] for token in tokens)


def ended_after(text: str) -> int | None:
    """Return the number of tokens after which an answer with this text is ended; None if it is not."""
    tokens, text_of = tokens_of(text)
    detector = RepetitionDetector(text_of)
    return next((index + 1 for index, token in enumerate(tokens) if detector.add(token)), None)


@pytest.mark.parametrize(
    ("text", "most_tokens"),
    [
        ("Once there was " + "a tree that could grow " * 60, PROSE_TOKENS),
        ("no " * 1500, OTHER_TOKENS),
        ("The sea is calm. The ship is far. " * 40, PROSE_TOKENS),
        (
            "I am a keeper of the light, and every night I climb the stairs to look for ships at sea. " * 30,
            PROSE_TOKENS,
        ),
        ("1. " + "ha" * 5 + "。" + "我不知道怎么办呢" * 200, PROSE_TOKENS),
        # A period with a repetition inside.
        ("So it goes. " + ("ha " * 20 + "he said, and laughed again. ") * 20, 6 * 60),
        (("ha " * 60 + "he said. ") * 20, 6 * 130),
        ("!" * 3000, OTHER_TOKENS),
        ("\n" * 3000, OTHER_TOKENS),
        ("| - | - |\n" * 400, OTHER_TOKENS),
        ("x = x + 1;\n" * 400, OTHER_TOKENS),
    ],
)
def test_an_endless_repetition_is_found_soon(text: str, most_tokens: int) -> None:
    found = ended_after(text)
    assert found is not None
    # A check every so many tokens, and what comes before the repetition or within its first period.
    assert found <= most_tokens + 2 * CHECKED_EVERY + 32


def test_a_long_period_is_found_after_six_times() -> None:
    paragraph = " ".join(f"word{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(200)) + ". "
    period = len(tokens_of(paragraph)[0])
    assert (ended_after("A story. " + paragraph * 10) or 0) in range(6 * period, 6 * period + 3 * CHECKED_EVERY)


@pytest.mark.parametrize(
    "text",
    [
        POEM * 4,
        "".join(
            f"Verse {n} is about day {n}, when {name} went out.\n{CHORUS}" for n, name in enumerate("abcdefghijkl")
        ),
        "".join(f"{n}, " for n in range(1, 600)),
        "".join(f"{n}. The tree is tall.\n" for n in range(1, 100)),
        "".join(TABLE.format(n=n) for n in range(200)),
        "x = [" + "0, " * 300 + "]",
        "```\n" + ("+" + "-" * 60 + "+\n|" + " " * 60 + "|\n") * 6 + "```",
        "def f():\n" + "".join(f"    values[{n}] = read(stream)\n    check(values[{n}])\n" for n in range(120)),
        "<tr>" + "<td></td>" * 80 + "</tr>",
        "".join(f'{{"id": {n}, "name": "", "tags": [], "ok": true}},\n' for n in range(100)),
        "Happy birthday to you, " * 4,
        "the same the other " * 9 + "and then it goes on in another way. ",
        "=" * 400,
        "".join(f"{n} x 7 = {7 * n}\n" for n in range(300)),
        "Ha" + "ha" * 100,
    ],
)
def test_texts_that_are_alike_for_a_while_are_no_endless_repetition(text: str) -> None:
    assert ended_after(text) is None


def test_the_shortest_period_comes_first_and_no_multiple_of_it() -> None:
    assert list(repeated_periods([9, *[1, 2, 3] * 20])) == [(3, 60)]
    assert list(repeated_periods([7] * 100)) == [(1, 100)]
    assert list(repeated_periods(list(range(200)))) == []
    assert list(repeated_periods([])) == []
    assert list(repeated_periods([*range(500), *[*range(100)] * 7])) == [(100, 700)]


def test_a_repetition_that_ends_was_none() -> None:
    tokens, text_of = tokens_of("a tree that could grow " * 20 + "and it did. " + "It was tall and green. " * 20)
    detector = RepetitionDetector(text_of)
    assert not any(detector.add(token) for token in tokens)


def test_a_detector_holds_no_more_tokens_than_its_window() -> None:
    detector = RepetitionDetector(lambda _tokens: "")
    for token in range(5 * WINDOW):
        assert not detector.add(token)
    assert len(detector._latest) < WINDOW + CHECKED_EVERY
