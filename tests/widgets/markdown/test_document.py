"""Documents drawn piece by piece: equal to those drawn at once, and no external resource is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtCore import QCoreApplication, QUrl
from PySide6.QtGui import QTextCharFormat, QTextDocument
from PySide6.QtWidgets import QApplication

from tests.widgets.markdown.test_stream import texts
from widgets.common.palette import DARK, LIGHT
from widgets.markdown.document import MarkdownDocument
from widgets.markdown.formulas import Formula, FormulaKey, Formulas
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


def test_a_formula_is_drawn_in_the_background_and_shown_as_its_source_before() -> None:
    later: list[Callable[[], None]] = []
    picture = Formula(b"<svg></svg>", 10.0, 8.0, 2.0)
    formulas = Formulas(later.append, lambda key: picture if key.source == "x^2" else None)
    keys = [FormulaKey("x^2", False, "#ff0000"), FormulaKey("}{", False, "#ff0000")]
    assert [formulas.get(key) for key in keys] == [None, None]
    assert [formulas.get(key) for key in keys] == [None, None]
    assert len(later) == 2, "each is asked for once"
    for work in later:
        work()
    QCoreApplication.processEvents()
    assert [formulas.get(key) for key in keys] == [picture, None]
    assert len(later) == 2
