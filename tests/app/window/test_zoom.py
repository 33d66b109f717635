"""The zoom of the interface: applied at once and everywhere, and stored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from PySide6.QtWidgets import QApplication

from app.theme import style_sheet
from app.wiring import WindowObjects
from widgets.common.palette import DARK
from widgets.common.text import set_zoom, text_width, ui_font, zoom


@pytest.fixture(autouse=True)
def own_size() -> Iterator[None]:
    """Leave no zoom to other tests."""
    yield
    set_zoom(1.0)


def test_keys_zoom_everything_and_the_zoom_is_kept(window: WindowObjects, qapp: QApplication) -> None:
    main, bar = window.main, window.main.settings_bar
    width, height = text_width("Layer", ui_font()), bar.model_button.height()
    keys = {key.toString() for name in ("zoom_in", "zoom_out") for key in window.actions[name].shortcuts()}
    assert {"Ctrl++", "Ctrl+=", "Ctrl+-"} <= keys

    for _ in range(3):
        window.actions["zoom_in"].trigger()
    assert window.desk.settings.zoom_percent == 150
    assert text_width("Layer", ui_font()) > 1.3 * width
    assert bar.model_button.height() == 1.5 * height
    assert main.editor.view.transform().m11() == 1.5
    assert "font-size: 20px" in qapp.styleSheet()

    window.actions["zoom_out"].trigger()
    assert window.desk.settings.zoom_percent == 125
    for _ in range(9):
        window.actions["zoom_in"].trigger()
    assert window.desk.settings.zoom_percent == 200
    window.actions["zoom_reset"].trigger()
    assert (window.desk.settings.zoom_percent, zoom()) == (100, 1.0)
    assert bar.model_button.height() == height


def test_borders_keep_their_width() -> None:
    assert "border: 1px solid" in style_sheet(DARK, 2.0)
    assert "font-size: 26px" in style_sheet(DARK, 2.0)
    assert style_sheet(DARK, 1.0) == style_sheet(DARK)
