"""Answers made to block the window: endless formulas, lines and tables are bounded before Qt gets them."""

from __future__ import annotations

import pytest

from widgets.markdown.blocks import MAX_FORMULAS, MAX_PIECES, Block, Table
from widgets.markdown.stream import MarkdownStream, parse_whole


def formulas(blocks: tuple[Block, ...]) -> int:
    return sum(bool(span.formula) for block in blocks for span in block.all_spans)


def pieces(blocks: tuple[Block, ...]) -> int:
    return sum(len(block.rows) * len(block.alignments) if isinstance(block, Table) else 1 for block in blocks)


MANY_FORMULAS = {
    "one paragraph": " ".join(f"${number}$" for number in range(700)),
    "a table": "|a|b|\n|-|-|\n" + "".join(f"|${row}$|$-{row}$|\n" for row in range(700)),
    "paragraphs": "".join(f"$${number}$$\n\n" for number in range(700)),
}


@pytest.mark.parametrize("name", MANY_FORMULAS)
def test_so_many_formulas_are_drawn_and_the_others_stay_words(name: str) -> None:
    """More than are kept were made again at each layout of a paragraph, without end."""
    text = MANY_FORMULAS[name]
    whole = parse_whole(text)
    assert formulas(whole) == MAX_FORMULAS
    assert "699" in "".join(span.text for block in whole for span in block.all_spans)
    stream = MarkdownStream()
    finished: tuple[Block, ...] = ()
    for start in range(0, len(text), 1000):
        stream.append(text[start : start + 1000])
        parsed = stream.parse()
        finished += parsed.finished
    assert (*finished, *parsed.open_end) == whole


MANY_LINES = {
    "list": "- a\n" * 15_000,
    "paragraphs": "a\n\n" * 12_000,
    "code": "```\n" + "a\n" * 15_000 + "```\n",
    "tables": ("|" + "a|" * 40 + "\n|" + "-|" * 40 + "\n" + ("|" + "b|" * 40 + "\n") * 40 + "\n") * 8,
}


@pytest.mark.parametrize("name", MANY_LINES)
def test_so_many_lines_and_cells_are_drawn(name: str) -> None:
    """Fifty thousand lines stopped the window for seconds."""
    blocks = parse_whole(MANY_LINES[name])
    assert MAX_PIECES // 2 < pieces(blocks) <= MAX_PIECES + 2
    assert "not shown" in "".join(span.text for span in blocks[-1].all_spans)
    if name == "code":
        code = [block for block in blocks if not isinstance(block, Table) and block.kind == "code"]
        assert code[0].begins
        assert code[-1].ends
