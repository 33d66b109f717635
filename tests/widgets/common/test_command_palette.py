"""The command palette: matching entries, their order, and use by keyboard."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QLineEdit, QWidget
from pytestqt.qtbot import QtBot
from shiboken6 import delete

from widgets.common.command_palette import MAX_SHOWN, CommandPalette, PaletteEntry, matching


def entry(title: str, group: str = "File") -> PaletteEntry:
    return PaletteEntry(title, group, lambda: None)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ["Reload", "Load", "Open Layout", "qwen3-30b-a3b"]),
        ("load", ["Load", "Reload"]),
        ("LAY op", ["Open Layout"]),
        ("30b qwen", ["qwen3-30b-a3b"]),
        ("model", ["Load"]),
        ("model lo", ["Load"]),
        ("nothing", []),
    ],
)
def test_every_word_must_occur_and_beginnings_come_first(text: str, found: list[str]) -> None:
    entries = [entry("Reload"), entry("Load", "Model"), entry("Open Layout"), entry("qwen3-30b-a3b", "")]
    assert [each.title for each in matching(entries, text)] == found


@pytest.fixture
def window(qtbot: QtBot) -> QWidget:
    window = QWidget()
    window.resize(900, 700)
    qtbot.addWidget(window)
    with qtbot.waitExposed(window):
        window.show()
    return window


def opened(window: QWidget, *entries: PaletteEntry) -> CommandPalette:
    palette = CommandPalette(entries, window)
    palette.open()
    return palette


def test_the_selected_entry_runs_after_the_palette_has_closed(window: QWidget, qtbot: QtBot) -> None:
    ran: list[tuple[str, bool]] = []
    palette: CommandPalette

    def noting(name: str) -> PaletteEntry:
        return PaletteEntry(name, "File", lambda: ran.append((name, palette.isVisible())))

    palette = opened(window, *map(noting, ("first", "second", "third")))
    for key in (Qt.Key.Key_Down, Qt.Key.Key_Down, Qt.Key.Key_Down, Qt.Key.Key_Up):
        QTest.keyClick(palette.search_edit, key)
    with qtbot.waitSignal(palette.destroyed):
        QTest.keyClick(palette.search_edit, Qt.Key.Key_Return)
    assert ran == [("second", False)]


def test_escape_closes_it_and_runs_nothing(window: QWidget, qtbot: QtBot) -> None:
    ran: list[str] = []
    palette = opened(window, PaletteEntry("only", "File", lambda: ran.append("only")))
    with qtbot.waitSignal(palette.destroyed):
        QTest.keyClick(palette.search_edit, Qt.Key.Key_Escape)
    assert ran == []


def test_without_a_match_it_says_so_and_return_does_nothing(window: QWidget) -> None:
    palette = opened(window, entry("only"))
    QTest.keyClicks(palette.search_edit, "xyz")
    assert palette.titles == ()
    assert not palette.list_view.isVisible()
    QTest.keyClick(palette.search_edit, Qt.Key.Key_Return)
    assert palette.isVisible()


def test_entries_that_come_later_leave_the_selection(window: QWidget) -> None:
    palette = opened(window, entry("first"), entry("second"))
    QTest.keyClick(palette.search_edit, Qt.Key.Key_Down)
    palette.add([entry("third")])
    assert palette.titles == ("first", "second", "third")
    assert palette.list_view.currentIndex().row() == 1


def test_of_thousands_of_models_as_many_are_listed_as_can_be_read(window: QWidget) -> None:
    palette = opened(window, *(entry(f"model {number}") for number in range(10_000)))
    assert len(palette.titles) == MAX_SHOWN
    QTest.keyClicks(palette.search_edit, "model 9999")
    assert palette.titles == ("model 9999",)


def test_it_closes_after_the_widget_before_it_is_gone(window: QWidget, qtbot: QtBot) -> None:
    before = QLineEdit(window)
    before.show()
    before.setFocus()
    palette = opened(window, entry("only"))
    delete(before)
    with qtbot.waitSignal(palette.destroyed):
        QTest.keyClick(palette.search_edit, Qt.Key.Key_Escape)
