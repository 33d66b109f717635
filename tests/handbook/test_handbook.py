"""The handbook: complete, small, with the window's own names, and opened at the page of the focused widget."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QImage
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from app.models.auto_layouts import STRATEGY_TEXTS
from app.window import menus
from app.window.handbook import FIRST_PAGE, PICTURE_WIDTH, HandbookWindow, found_in, read_pages
from resources.loader import handbook
from tests.support.accessibility import nameless
from widgets.layout_editor.keyboard import KEYS

MAX_BYTES = 2_000_000
PAGES = read_pages(handbook())
MENUS = ("File", "Layout", "Devices", "Model", "Chat", "View", "Help")


def test_there_are_fourteen_pages_and_no_other() -> None:
    assert len(PAGES) == 15
    assert {page.name for page in PAGES} == {path.stem for path in handbook().glob("*.md")}
    assert all(page.title and not page.title.startswith("#") for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: object) -> None:
    assert isinstance(page, type(PAGES[0]))
    for target in re.findall(r"\]\(([^)]+)\)", page.text):
        assert (handbook() / target).is_file(), target


def test_pictures_are_used_and_small() -> None:
    named = {Path(name).name for page in PAGES for name in re.findall(r"\]\(pictures/([^)]+)\)", page.text)}
    pictures = sorted((handbook() / "pictures").iterdir())
    assert {path.name for path in pictures} == named
    assert sum(path.stat().st_size for path in pictures) < MAX_BYTES


def test_commands_are_called_as_in_the_menus() -> None:
    """`**Menu > Command**` is what people look for in the window."""
    titles = [f'"Auto Layout: {words.title}"' for words in STRATEGY_TEXTS]
    known = "\n".join([Path(menus.__file__).read_text(encoding="utf-8"), *titles]).replace("&", "")
    text = "".join(page.text for page in PAGES)
    commands = set(re.findall(rf"\*\*(?:{'|'.join(MENUS)}) > ([^*>]+)\*\*", text))
    assert len(commands) > 15
    assert sorted(name for name in commands if f'"{name}"' not in known) == []


def test_the_keys_of_the_editor_are_told() -> None:
    text = next(page.text for page in PAGES if page.name == "keys")
    for keys in KEYS:
        for key in re.split(r", | \(or Alt\)", keys):
            assert key in text, key


@pytest.fixture
def window(qtbot: QtBot) -> HandbookWindow:
    shown = HandbookWindow()
    qtbot.addWidget(shown)
    shown.show()
    return shown


def test_every_page_can_be_chosen_and_links_lead_on(window: HandbookWindow) -> None:
    for row, page in enumerate(PAGES):
        window.list_widget.setCurrentRow(row)
        assert window.page == page.name
        assert page.title in window.browser.toPlainText()
    window.show_page(FIRST_PAGE)
    window.browser.setSource(window.browser.source().resolved("chat.md"))
    assert window.page == "chat"
    assert window.list_widget.currentItem().text() == "Chat"
    assert nameless(window) == []


def test_pictures_are_shown_no_wider_than_a_page(window: HandbookWindow) -> None:
    name = window.browser.source().resolved("pictures/window.png")
    image = window.browser.loadResource(2, name)
    assert isinstance(image, QImage)
    assert not image.isNull()
    assert image.deviceIndependentSize().width() == PICTURE_WIDTH


def test_words_find_pages_and_are_marked_there(window: HandbookWindow) -> None:
    QTest.keyClicks(window.search_edit, "Mixtral")
    assert window.found == ("experts",)
    assert window.page == "experts"
    assert window.browser.textCursor().selectedText() == "Mixtral"
    QTest.keyClick(window.search_edit, Qt.Key.Key_A)
    assert not window.found
    window.search_edit.clear()
    assert len(window.found) == len(PAGES)


def test_all_words_have_to_be_on_a_page() -> None:
    page = PAGES[1]
    assert found_in(page, "LAYOUT lane")
    assert not found_in(page, "layout zebra")
