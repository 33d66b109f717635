"""What holds for the window in any language; `test_spoken.py` runs these in others."""

from __future__ import annotations

from collections import Counter

from PySide6.QtCore import QPoint, QRect, Qt
from PySide6.QtGui import QGuiApplication, QKeySequence
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QMenu

from app.wiring import WindowParts
from engine.language import language_name, tr
from tests.app.window.test_accessibility import window

__all__ = ("window",)


def letters(menu: QMenu) -> list[str]:
    """Return what chooses the entries of a menu on the keyboard."""
    keys = (QKeySequence.mnemonic(action.text()).toString() for action in menu.actions() if not action.isSeparator())
    return [key for key in keys if key]


def test_no_letter_is_there_twice_in_a_menu(window: WindowParts) -> None:
    bar = window.main.menuBar()
    titles = [QKeySequence.mnemonic(action.text()).toString() for action in bar.actions()]
    found = {name: letters(menu) for name, menu in window.main.menus.items()}
    found["menu bar"] = titles
    twice = {name: [key for key, count in Counter(keys).items() if count > 1] for name, keys in found.items()}
    assert {name: keys for name, keys in twice.items() if keys} == {}
    assert all(titles)


def test_the_window_is_laid_out_as_the_language_is_written(window: WindowParts) -> None:
    is_mirrored = language_name().startswith("ar")
    direction = Qt.LayoutDirection.RightToLeft if is_mirrored else Qt.LayoutDirection.LeftToRight
    assert QGuiApplication.layoutDirection() is direction
    main = window.main
    models, chat = main.docks["models"], main.docks["chat"]
    # Qt keeps docks at the sides that they were given; what is in them is mirrored.
    assert models.isVisible() and chat.isVisible()
    bar = main.settings_bar
    load, button = bar.load_buttons, bar.model_button
    assert (load.x() < button.x()) is is_mirrored
    assert main.menus["File"].title() == tr("&File")


def test_layers_are_where_they_are_drawn(window: WindowParts) -> None:
    view = window.main.editor.view
    viewport = view.viewport()
    window.actions["arrange_place"].trigger()
    plan = window.desk.document.plan
    assert plan is not None
    rect = view.accessible_rect_of_layer(0) if hasattr(view, "accessible_rect_of_layer") else QRect()
    assert rect is not None
    QTest.mouseMove(viewport, QPoint(5, 5))
