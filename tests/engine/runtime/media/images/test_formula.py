"""Formulas as images: which are drawn, and which stay text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.runtime.media.images.formula import DrawFormula, DrawnFormula, FormulaProcess, draw_formula


def draw(source: str) -> DrawnFormula:
    return draw_formula(DrawFormula(source=source, is_display=False, colour="#ff0000", seconds=1.0))


@pytest.mark.parametrize("source", [r"\frac{a}{b}", "x^2", r"\begin{cases} a \\ b \end{cases}"])
def test_formulas_have_a_picture(source: str) -> None:
    formula = draw(source)
    assert formula.svg.startswith("<svg")
    assert 0 < formula.depth_px < formula.height_px


@pytest.mark.parametrize("source", [r"\frac{a", "}{"])
def test_what_is_no_formula_stays_words(source: str) -> None:
    assert not draw(source).svg


@pytest.mark.parametrize("source", ["{" * 30 + "}" * 30, r"\left(" * 200])
def test_what_is_too_deep_is_not_tried(source: str) -> None:
    assert FormulaProcess().draw(source, is_display=True, colour="#ff0000") is None


@given(st.text(alphabet=r"\frac{}^_abx &" + "\n∑", max_size=30))
def test_no_formula_raises(source: str) -> None:
    draw(source)
