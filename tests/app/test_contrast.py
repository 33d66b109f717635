"""Contrast of every pair of text and background colours in stylesheet and palette."""

from __future__ import annotations

import re

import pytest
from PySide6.QtGui import QColor, QPalette

from app.theme import qt_palette, style_sheet
from resources.loader import read_text
from widgets.common.palette import DARK, FILLED, LIGHT, SURFACES, WORDS, Palette

WORDS_CONTRAST = 4.5
"""Of WCAG 2.2, 1.4.3 (AA) for text of any size."""
SHAPES_CONTRAST = 3.0
"""Of WCAG 2.2, 1.4.11, for what has to be told apart without being read."""
SHAPES = ("weights", "experts", "kv", "compute", "pipeline", "draft", "other")
Role = QPalette.ColorRole
QT_PAIRS = (
    (Role.WindowText, Role.Window),
    (Role.Text, Role.Base),
    (Role.Text, Role.AlternateBase),
    (Role.ButtonText, Role.Button),
    (Role.ToolTipText, Role.ToolTipBase),
    (Role.HighlightedText, Role.Highlight),
    (Role.Link, Role.Base),
    (Role.Link, Role.Window),
    (Role.PlaceholderText, Role.Base),
    (Role.PlaceholderText, Role.Button),
)

both_themes = pytest.mark.parametrize("palette", [DARK, LIGHT], ids=lambda palette: palette.name)


def luminance(name: str) -> float:
    """Return the relative luminance of a colour, by WCAG."""
    color = QColor(name)
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (color.redF(), color.greenF(), color.blueF())
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours, 1 to 21."""
    darker, lighter = sorted((luminance(first), luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


def weak(palette: Palette, pairs: set[tuple[str, str]], goal: float) -> dict[tuple[str, str], float]:
    """Return the pairs of names (what is shown, its ground) with less contrast than `goal`."""
    found = {(over, ground): contrast(getattr(palette, over), getattr(palette, ground)) for over, ground in pairs}
    return {pair: round(value, 2) for pair, value in found.items() if value < goal}


def rules(sheet: str) -> list[tuple[str, dict[str, str]]]:
    """Return selectors and properties of a stylesheet."""
    plain = re.sub(r"/\*.*?\*/", "", sheet, flags=re.DOTALL)
    found = []
    for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", plain):
        parts = (entry.split(":", 1) for entry in body.split(";") if ":" in entry)
        found.append((selectors.strip(), {name.strip(): value.strip() for name, value in parts}))
    return found


def test_contrast_is_as_the_standard_counts_it() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@both_themes
def test_words_can_be_read_on_every_surface(palette: Palette) -> None:
    pairs = {(word, surface) for word in WORDS for surface in SURFACES}
    pairs |= {(words, ground) for ground, words in FILLED.items()}
    assert weak(palette, pairs, WORDS_CONTRAST) == {}


@both_themes
def test_parts_of_bars_and_the_focus_can_be_told_from_their_ground(palette: Palette) -> None:
    grounds = ("background", "panel", "card")
    pairs = {(shape, ground) for shape in (*SHAPES, "accent") for ground in grounds}
    assert weak(palette, pairs, SHAPES_CONTRAST) == {}


@both_themes
def test_every_pair_of_the_stylesheet_can_be_read(palette: Palette) -> None:
    sheet = rules(read_text("style.qss"))
    assert len(sheet) > 50
    pairs, strange = set(), []
    for selectors, properties in sheet:
        for words_key, ground_key in (("color", "background"), ("selection-color", "selection-background-color")):
            words, ground = (properties.get(key, "") for key in (words_key, ground_key))
            grounds = {ground.removeprefix("$")} if ground.startswith("$") else set(SURFACES)
            if words:  # without a ground of its own, on whatever lies below
                pairs |= {(words.removeprefix("$"), each) for each in grounds}
            elif ground and not grounds <= set(SURFACES) and "::" not in selectors:
                strange.append(selectors)
    assert strange == [], "words of another rule stand on a ground that is no surface"
    assert weak(palette, pairs, WORDS_CONTRAST) == {}
    assert "$" not in style_sheet(palette)


@both_themes
def test_what_qt_draws_by_itself_can_be_read(palette: Palette) -> None:
    colors = qt_palette(palette)
    found = {
        (words.name, ground.name): contrast(colors.color(words).name(), colors.color(ground).name())
        for words, ground in QT_PAIRS
    }
    assert {pair: value for pair, value in found.items() if value < WORDS_CONTRAST} == {}
