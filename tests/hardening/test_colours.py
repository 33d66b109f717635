"""Code blocks in answers: the model chooses language and content, and the syntax highlighter is bounded."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import count
from types import SimpleNamespace

import pytest

from tests.support.patience import DEADLINE_S
from tests.support.selection import some
from widgets.markdown import highlight
from widgets.markdown.blocks import TextSpan
from widgets.markdown.highlight import LANGUAGES, MAX_COLOURED_CHARACTERS, TimeUsed
from widgets.markdown.stream import parse_whole

_TRIES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from widgets.markdown import highlight as module
from widgets.markdown.highlight import MAX_COLOURED_CHARACTERS as n, MAX_SEGMENT_CHARACTERS, TimeUsed, highlight
module.MAX_SEGMENT_S = 1e9
lines = MAX_SEGMENT_CHARACTERS // (n + 1)
words = ["a", " ", "(", "{", "[", '"', "'", "<", "/", "#", "$", "1", "@", "%", "`", "-", "|", "*", "_", ",", ";", "a=",
         "a.", "/*", "<a ", "a:", '"a' + chr(92), "&a", chr(9) + " ", "a->", "a, ", "a a ", chr(92)]
for word in words:
    line = (word * n)[:n]
    code = [line] * lines
    assert ["".join(span.text for span in spans) for spans in highlight(code, sys.argv[1], TimeUsed())] == code, word
"""


@pytest.mark.parametrize("language", some(sorted(LANGUAGES), 2))
def test_no_language_holds_up_the_window(language: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _TRIES, language], timeout=DEADLINE_S, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("language", ["autoit", "c-objdump", "no such", "\ud800", "x" * 100_000])
def test_a_language_that_nobody_has_tried_has_one_colour(language: str) -> None:
    lines = highlight.highlight([" " * 300, "if (x)"], language, TimeUsed())
    assert [span.token for spans in lines for span in spans] == ["", ""]


@pytest.mark.parametrize(
    ("language", "lines"),
    [
        ("markdown", ["```c", "int i;", "```", ""]),
        ("rst", [".. code:: c", "", "   int i;", "", "a"]),
        ("http", ["POST /a HTTP/1.1", "Content-Type: text/x-csrc", "", "int i;"]),
        ("postgresql", ["DO $$ int i; $$ LANGUAGE c;"]),
    ],
)
def test_a_text_chooses_no_language_inside_another_one(language: str, lines: list[str]) -> None:
    spans = [span for spans in highlight.highlight(lines, language, TimeUsed()) for span in spans]
    assert "int i;" in "".join(span.text for span in spans)
    assert [span.text for span in spans if span.text.strip() in ("int", "i")] == []


def test_segments_are_bounded_in_lines_and_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    segments: list[str] = []

    def colour(text: str, _language: str) -> tuple[tuple[TextSpan, ...], ...]:
        segments.append(text)
        return tuple((TextSpan(line),) for line in text.split("\n"))

    monkeypatch.setattr(highlight, "_highlight_segment", colour)
    lines = ["a"] * 200 + ["b" * MAX_COLOURED_CHARACTERS] * 100
    assert ["".join(span.text for span in spans) for spans in highlight.highlight(lines, "java", TimeUsed())] == lines
    assert max(map(len, segments)) <= highlight.MAX_SEGMENT_CHARACTERS
    assert max(text.count("\n") + 1 for text in segments) == highlight.SEGMENT_LINES


def test_long_lines_and_slow_segments_have_one_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highlight, "_slow", Counter())

    def colours(line: str) -> int:
        return len({span.token for spans in highlight.highlight([line], "py", TimeUsed()) for span in spans})

    assert colours("import os") > 1
    assert colours("import os" + " " * MAX_COLOURED_CHARACTERS) == 1
    monkeypatch.setattr(highlight, "MAX_SEGMENT_S", -1)
    highlight._slow.clear()
    assert colours("import sys") > 1
    assert colours("import abc") > 1, "one slow segment may be a garbage collection"
    assert colours("import json") == 1


def test_the_code_of_a_message_has_colours_until_its_time_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code just below the limit of each segment kept the thread busy for 10 s."""
    readings = count(step=highlight.MAX_SEGMENT_S / 2)
    monkeypatch.setattr(highlight, "time", SimpleNamespace(thread_time=lambda: next(readings)))
    blocks = parse_whole("\n\n".join(f"```py\nimport a{number}\n```" for number in range(100)))
    coloured = [any(span.token for span in block.all_spans) for block in blocks]
    assert coloured == sorted(coloured, reverse=True)
    assert sum(coloured) * highlight.MAX_SEGMENT_S / 2 == pytest.approx(highlight.MAX_MESSAGE_S, abs=0.2)
