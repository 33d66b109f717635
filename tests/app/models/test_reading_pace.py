"""Estimated remaining time of a prompt: from the tokens evaluated since its start, without cached ones."""

from __future__ import annotations

from app.models.reading_pace import ReadingPace, left_words
from engine.runtime.session.events import Reading


def reading(tokens: int, request: int = 1) -> Reading:
    return Reading(request=request, read_tokens=tokens, prompt_tokens=1000)


def test_the_rest_takes_as_long_as_what_was_read() -> None:
    now_s = 10.0
    pace = ReadingPace(lambda: now_s)
    assert pace.left_s(reading(400)) is None
    now_s = 10.9
    assert pace.left_s(reading(500)) is None, "too early"
    now_s = 12.0
    assert pace.left_s(reading(500)) == 10.0
    now_s = 13.0
    assert pace.left_s(reading(500)) == 15.0, "a slow batch"
    now_s = 14.0
    assert pace.left_s(reading(800)) == 2.0
    assert pace.left_s(reading(1000)) is None
    assert pace.left_s(reading(0, request=2)) is None
    now_s = 16.0
    assert pace.left_s(reading(0, request=2)) is None, "nothing was read"


def test_it_is_said_in_whole_seconds() -> None:
    assert left_words(None) == ""
    assert left_words(0.2) == ", 1 s left"
    assert left_words(200) == ", 3 min 20 s left"
