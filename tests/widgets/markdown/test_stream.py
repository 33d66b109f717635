"""Any text in any pieces: the same blocks as at once, no exception, and no hidden text."""

from __future__ import annotations

import re
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widgets.markdown.blocks import MAX_PIECES, Block, Line, Table, TextSpan, visible
from widgets.markdown.stream import MAX_SHOWN_CHARACTERS, MarkdownStream, code_sources, parse_whole

PARTS = (
    *(
        "# ",
        "## x",
        "- ",
        "* ",
        "1. ",
        "2) ",
        "- [ ] ",
        "- [x] ",
        "> ",
        ">> ",
        "```",
        "```python\n",
        "~~~",
        "    ",
        "\t",
    ),
    *("\n", "\n\n", "\r\n", "\r", " ", "  \n", "---", "===", "| a | b |", "|---|:-:|", "|", "**", "*", "_", "~~", "`"),
    *(
        "$",
        "$$",
        "$x$",
        "$$\nx\n$$",
        "\\(",
        "\\)",
        "\\[",
        "\\]",
        "\\",
        "$5 and $6",
        "[a](http://b.example)",
        "[a]: http://b",
    ),
    *(
        "![i](http://c/d.png)",
        "<b>",
        "&amp;",
        "&#x202e;",
        "\u202e",
        "\x07",
        "\ufffc",
        "\u2029",
        "word",
        "1",
        "https://e.example/x",
    ),
    *("def f(): return 'a'", "你好", "🙂", "javascript:x", "[b](javascript:alert)", "\ud800"),
)
texts = st.lists(st.sampled_from(PARTS), max_size=25).map("".join) | st.text(max_size=60)


def in_pieces(text: str, cuts: list[int]) -> tuple[Block, ...]:
    stream = MarkdownStream()
    finished: list[Block] = []
    end: tuple[Block, ...] = ()
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for first, last in pairwise(places):
        stream.append(text[first:last])
        parsed = stream.parse()
        finished += parsed.finished
        end = parsed.open_end
    return (*finished, *end)


def spans_of(blocks: tuple[Block, ...]) -> list[TextSpan]:
    return [span for block in blocks for span in block.all_spans]


@given(texts, st.lists(st.integers(0, 2000), max_size=12))
def test_the_pieces_do_not_matter(text: str, cuts: list[int]) -> None:
    assert in_pieces(text, cuts) == parse_whole(text)


@given(texts)
def test_a_letter_at_a_time_comes_to_the_same(text: str) -> None:
    assert in_pieces(text, list(range(len(text)))) == parse_whole(text)


@given(texts)
def test_nothing_is_hidden_and_links_are_of_a_few_kinds(text: str) -> None:
    for span in spans_of(parse_whole(text)):
        assert not re.search("[\x00-\x08\x0e-\x1f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufffc\ufdd0\ud800]", span.text)
        assert not span.link or re.match("(https?|mailto):", span.link, re.IGNORECASE)


def shown_code(text: str) -> list[str]:
    """Return the code blocks of a text as they are shown."""
    code: list[str] = []
    for line in parse_whole(text):
        if isinstance(line, Line) and line.kind == "code":
            code = [*code, line.text] if line.begins else [*code[:-1], f"{code[-1]}\n{line.text}"]
    return code


@given(texts)
def test_each_shown_code_block_has_its_source(text: str) -> None:
    text = text.rstrip("\r")  # A last one is held back: it may be the first half of a line end.
    assert [visible(source) for source in code_sources(text)] == shown_code(text)


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        (
            "```py\ns = 'a\u200bb'  # \u00ad \\u200b\n```\n\n~~~\n\x07\r\n~~~",
            ["s = 'a\u200bb'  # \u00ad \\u200b", "\x07"],
        ),
        ("1. a\n\n   ```\n   b\u200e\n\n     c\n   ```\n> ```\n> \u202ed", ["b\u200e\n\n  c", "\u202ed"]),
        ("```\n" + "x\n" * (MAX_PIECES + 5), ["\n".join("x" * (MAX_PIECES + 5))]),
        ("```\n" + "y" * (MAX_SHOWN_CHARACTERS + 5), ["y" * (MAX_SHOWN_CHARACTERS + 5)]),
    ],
    ids=["escapes", "indents", "lines", "characters"],
)
def test_the_source_of_code_has_what_is_not_shown(text: str, sources: list[str]) -> None:
    assert code_sources(text) == sources
    assert shown_code(text) != sources


def words(text: str) -> list[str]:
    return [block.text for block in parse_whole(text) if isinstance(block, Line)]


def formulas(text: str) -> list[str]:
    return [span.text for span in spans_of(parse_whole(text)) if span.formula]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Let $x^2$ be", ["x^2"]),
        (r"and \(a+b\), \[c\]", ["a+b", "c"]),
        ("$$\n\\frac{a}{b}\n$$", ["\\frac{a}{b}"]),
        ("\\[\nE = mc^2\n\\]\n", ["E = mc^2"]),
        ("It costs $5 and then $10.", []),
        ("US$3 to US$4", []),
        ("`$x$` and\n```\n$y$\n\\(z\\)\n```", []),
        ("$$ never\n\nclosed", []),
        (r"\\(no\\)", []),
    ],
)
def test_what_is_a_formula(text: str, found: list[str]) -> None:
    assert formulas(text) == found


def test_lists_tasks_and_quotes() -> None:
    blocks = parse_whole("3. a\n4. b\n   - [x] c\n\n> d\n>> e\n")
    assert [(b.marker, b.text, b.indent, b.quote) for b in blocks if isinstance(b, Line)] == [
        ("3.", "a", 1, 0),
        ("4.", "b", 1, 0),
        ("☑", "c", 2, 0),
        ("", "d", 0, 1),
        ("", "e", 0, 2),
    ]


def test_a_table_has_its_cells_whatever_its_rows_lack() -> None:
    (table,) = parse_whole("| a | b |\n|---|--:|\n| 1 |\n")
    assert isinstance(table, Table)
    assert [["".join(span.text for span in cell) for cell in row] for row in table.rows] == [["a", "b"], ["1", ""]]
    assert table.alignments == ("left", "right")


def test_code_keeps_its_words_and_an_open_fence_is_closed_in_time() -> None:
    text = '```python\ndef f():\n\n    return "a$b$"'
    lines = [block for block in parse_whole(text) if isinstance(block, Line)]
    assert [line.text for line in lines] == ["def f():", "", '    return "a$b$"']
    assert {line.language for line in lines} == {"python"}
    assert lines[0].begins
    assert lines[-1].ends
    assert "keyword" in {span.token for span in lines[0].spans}


def test_html_and_pictures_are_words() -> None:
    assert words("<b onclick=x>hi</b> <script>") == ["<b onclick=x>hi</b> <script>"]
    (line,) = words("![cat](http://192.0.2.1/cat.png)")
    assert "http://192.0.2.1/cat.png" in line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[https://good.example](https://bad.example/x)", "https://good.example (bad.example)"),
        ("[https://good.example/login?bad.example](https://bad.example)", "https://good.example/login?bad.example ("),
        ("[good.example](https://good.example.bad.example)", "good.example (good.example.bad.example)"),
        ("[read more at bad.example](https://bad.example)", "read more at bad.example (bad.example)"),
        ("[good.example](https://good.example@bad.example/)", "good.example (bad.example)"),
        ("https://good.example@bad.example/", "https://good.example@bad.example/ (bad.example)"),
        ("[more](mailto:a@b.example)", "more (a@b.example)"),
        ("[x](https://[b)", "x ("),
    ],
    ids=["other", "in-the-query", "as-a-part", "among-words", "before-at", "itself-before-at", "mail", "broken"],
)
def test_an_address_that_is_not_what_it_says_is_told(text: str, shown: str) -> None:
    (line,) = words(text)
    assert line.startswith(shown)


@pytest.mark.parametrize(
    "text", ["https://good.example/x", "<https://GOOD.example>", "www.good.example", "a@b.example"]
)
def test_an_address_that_is_what_it_says_stands_once(text: str) -> None:
    assert words(text) == [text.strip("<>")]


@pytest.mark.parametrize(
    "text",
    ["a" * 1_000_000, "```\n" + "b" * 1_000_000, ">" * 100 + " deep", "- " * 100 + "deep", "[" * 20_000, "$" * 20_000],
    ids=["line", "code", "quotes", "lists", "brackets", "dollars"],
)
def test_what_is_too_much_is_bounded_and_not_lost(text: str) -> None:
    blocks = parse_whole(text)
    shown = sum(len(block.text) for block in blocks if isinstance(block, Line))
    assert shown <= MAX_SHOWN_CHARACTERS + 200
    assert max(len(block.text) for block in blocks if isinstance(block, Line)) <= 6_000
    assert "deep" not in text or any("deep" in word for word in words(text))


def test_code_that_comes_in_small_pieces_keeps_its_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its open end is parsed again and again; that time counts towards no limit."""
    # Each look at the clock takes 10 ms of processor time.
    clock = count(0.0, 0.01)
    monkeypatch.setattr("widgets.markdown.highlight.time.thread_time", lambda: next(clock))
    stream, text = MarkdownStream(), "```python\n" + "x = 'a'\n" * 200 + "```\n\nThat is all.\n\nYes."
    finished: list[Block] = []
    parsed = stream.parse()
    for first in range(0, len(text), 4):
        stream.append(text[first : first + 4])
        parsed = stream.parse()
        finished += parsed.finished
    assert (*finished, *parsed.open_end) == parse_whole(text)
    assert any(span.token for block in finished if isinstance(block, Line) for span in block.spans)
