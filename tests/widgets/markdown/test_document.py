"""Documents that are drawn piece by piece: the same as those that are drawn at once, and nothing is loaded for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtCore import QUrl
from PySide6.QtGui import QTextCharFormat, QTextDocument
from PySide6.QtWidgets import QApplication

from tests.widgets.markdown.test_stream import texts
from widgets.common.palette import DARK, LIGHT
from widgets.markdown.document import MarkdownDocument
from widgets.markdown.formulas import FormulaKey, make_formula
from widgets.markdown.stream import MarkdownStream, parse_whole
from widgets.markdown.typesetter import Typesetter


def never(_work: Callable[[], None]) -> None:
    """Formulas stay words here."""


@pytest.fixture(scope="module")
def typesetter(qapp: QApplication) -> Iterator[Typesetter]:
    made = Typesetter(never, never)
    yield made
    made.deleteLater()


def state_of(document: QTextDocument) -> list[tuple[object, ...]]:
    """Return every line with its formats, and the cells they are in."""
    lines: list[tuple[object, ...]] = []
    block = document.begin()
    while block.isValid():
        look = block.blockFormat()
        fragments = []
        inside = block.begin()
        while not inside.atEnd():
            fragment = inside.fragment()
            shape = fragment.charFormat()
            fragments.append((fragment.text(), shape.font().key(), colour_of(shape), shape.anchorHref()))
            inside += 1
        numbers = (look.leftMargin(), look.topMargin(), look.bottomMargin(), look.lineHeight(), look.textIndent())
        lines.append((block.text(), *numbers, tuple(fragments)))
        block = block.next()
    lines.append(tuple(type(frame).__name__ for frame in document.rootFrame().childFrames()))
    return lines


def colour_of(shape: QTextCharFormat) -> str:
    return shape.foreground().color().name()


def drawn(typesetter: Typesetter, text: str, cuts: list[int]) -> MarkdownDocument:
    document = typesetter.make_document(typesetter)
    stream = MarkdownStream()
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for first, last in pairwise(places):
        stream.append(text[first:last])
        parsed = stream.parse()
        document.update_blocks(parsed.finished, parsed.open_end)
    return document


@given(text=texts, cuts=st.lists(st.integers(0, 2000), max_size=8))
def test_the_pieces_do_not_matter(typesetter: Typesetter, text: str, cuts: list[int]) -> None:
    whole, pieces = drawn(typesetter, text, []), drawn(typesetter, text, cuts)
    assert state_of(pieces) == state_of(whole)
    assert pieces.blocks == parse_whole(text)


@given(text=texts)
def test_other_colours_change_nothing_else(typesetter: Typesetter, text: str) -> None:
    document = drawn(typesetter, text, [len(text) // 2])
    before = state_of(document)
    for palette in (LIGHT, DARK):
        typesetter.apply_palette(palette)
        document.restyle(typesetter.styles)
    assert state_of(document) == before


@pytest.mark.parametrize(
    "address",
    ["http://192.0.2.1/a.png", "file:///etc/passwd", "data:image/png;base64,AA", ":/a.png", "qrc:/a", "a.png"],
)
def test_nothing_is_loaded(typesetter: Typesetter, address: str) -> None:
    document = typesetter.make_document(typesetter)
    for kind in QTextDocument.ResourceType:
        assert document.resource(kind.value, QUrl(address)) is None


def test_code_is_copied_as_it_was_written(typesetter: Typesetter) -> None:
    code = "a = 1\n\n" + "x" * 5_000 + "\n    b"
    document = drawn(typesetter, f"| t |\n|---|\n\n```py\n{code}\n```\nafter\n\n    indented\n", [40])
    assert [(place.text, place.language) for place in document.decorations.code] == [(code, "py"), ("indented", "")]


def test_a_selection_is_copied_with_the_source_of_formulas(typesetter: Typesetter) -> None:
    document = drawn(typesetter, "so $x^2$ is\n\n```\ncode\n```\n", [])
    assert document.text_between(0, document.characterCount()) == "so x^2 is\ncode"


@pytest.mark.parametrize("source", [r"\frac{a}{b}", "x^2", r"\begin{cases} a \\ b \end{cases}"])
def test_formulas_have_a_picture(source: str) -> None:
    formula = make_formula(FormulaKey(source, False, "#ff0000"))
    assert formula is not None
    assert formula.svg.startswith(b"<svg")
    assert 0 < formula.depth < formula.height


@pytest.mark.parametrize("source", [r"\frac{a", "}{", "{" * 30 + "}" * 30, r"\left(" * 200])
def test_what_is_no_formula_stays_words(source: str) -> None:
    assert make_formula(FormulaKey(source, True, "#ff0000")) is None


@given(st.text(alphabet=r"\frac{}^_abx &" + "\n∑", max_size=30))
def test_no_formula_raises(source: str) -> None:
    make_formula(FormulaKey(source, True, "#000000"))
