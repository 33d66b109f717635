"""Text that fits its place, in figures of one width."""

from __future__ import annotations

from PySide6.QtGui import QFont
from pytestqt.qtbot import QtBot

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
