"""Tests of the window that must pass in every language; `test_spoken.py` runs them in others."""

from __future__ import annotations

from collections import Counter

from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication, QKeySequence
from PySide6.QtWidgets import QMenu

from app.wiring import WindowObjects
from engine.base.language import language_name, tr
from tests.app.window.test_accessibility import window

__all__ = ("window",)


def letters(menu: QMenu) -> list[str]:
    """Return what chooses the entries of a menu on the keyboard."""
    keys = (QKeySequence.mnemonic(action.text()).toString() for action in menu.actions() if not action.isSeparator())
    return [key for key in keys if key]


def test_no_letter_is_there_twice_in_a_menu(window: WindowObjects) -> None:
    bar = window.main.menuBar()
    titles = [QKeySequence.mnemonic(action.text()).toString() for action in bar.actions()]
    found = {name: letters(menu) for name, menu in window.main.menus.items()}
    found["menu bar"] = titles
    twice = {name: [key for key, count in Counter(keys).items() if count > 1] for name, keys in found.items()}
    assert {name: keys for name, keys in twice.items() if keys} == {}
    assert all(titles)


def test_the_window_is_laid_out_as_the_language_is_written(window: WindowObjects) -> None:
    is_mirrored = language_name().startswith("ar")
    direction = Qt.LayoutDirection.RightToLeft if is_mirrored else Qt.LayoutDirection.LeftToRight
    assert QGuiApplication.layoutDirection() is direction
    bar, view = window.main.settings_bar, window.main.editor.view
    assert (bar.load_buttons.x() < bar.model_button.x()) is is_mirrored
    # What is painted stays as it is: layers in their order, bars, graphs.
    assert view.layoutDirection() is Qt.LayoutDirection.LeftToRight
    assert window.main.menus["File"].title() == tr("&File")
