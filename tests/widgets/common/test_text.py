"""Displayed numbers and texts: thousands separators, and elided text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtGui import QFont
from pytestqt.qtbot import QtBot

from engine.base.units import SEPARATOR, format_count, parse_count
from widgets.common.text import elide, fitting, text_width, ui_font


def test_the_longest_form_that_fits_is_taken_and_the_last_one_cut(qtbot: QtBot) -> None:
    font = ui_font()
    forms = ("a rather long form", "a shorter form", "short")
    assert fitting(forms, font, 1000) == forms[0]
    assert fitting(forms, font, text_width(forms[1], font)) == forms[1]
    cut = fitting(forms, font, text_width("sho", font))
    assert cut.endswith("…")
    assert text_width(cut, font) <= text_width("sho…", font)
    assert fitting((), font, 100) == ""


def test_elided_text_fits(qtbot: QtBot) -> None:
    font = ui_font(11, bold=True)
    assert elide("short", font, 500) == "short"
    assert text_width(elide("a rather long text", font, 60), font) <= 60
    assert elide("text", font, -5) in ("", "…")


def test_figures_have_one_width(qtbot: QtBot) -> None:
    font = ui_font()
    assert font.isFeatureSet(QFont.Tag("tnum"))
    assert len({round(text_width(digit * 8, font), 3) for digit in "0123456789"}) == 1


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (999, "999"), (16384, "16 384"), (1048576, "1 048 576")])
def test_thousands_are_apart(count: int, text: str) -> None:
    assert format_count(count) == text.replace(" ", SEPARATOR)


@given(st.integers(min_value=0, max_value=10**17))
def test_what_is_shown_reads_back(count: int) -> None:
    assert parse_count(format_count(count)) == count
