"""A table of texts: the selection stays, Tab leaves the table, and texts are shown literally."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QPushButton, QVBoxLayout, QWidget
from pytestqt.qtbot import QtBot

from widgets.common.roles import plain_tool_tip
from widgets.common.row_table import RowTable

ROWS = (("a", "1"), ("b", "2"), ("c", "3"))


def texts(table: RowTable) -> list[tuple[str, ...]]:
    cells = [[table.item(row, column) for column in range(2)] for row in range(table.rowCount())]
    return [tuple(item.text() for item in row if item is not None) for row in cells]


def test_rows_are_replaced_and_the_chosen_one_is_not_told_again(qtbot: QtBot) -> None:
    table = RowTable(("Name", "Number"), "Things")
    qtbot.addWidget(table)
    table.show_rows(ROWS)
    assert texts(table) == list(ROWS)
    assert table.chosen_row is None
    told: list[int | None] = []
    table.itemSelectionChanged.connect(lambda: told.append(table.chosen_row))
    table.selectRow(1)
    assert told == [1]
    table.show_rows(ROWS[1:], chosen=0)
    assert texts(table) == list(ROWS[1:])
    assert table.chosen_row == 0
    table.show_rows(())
    assert texts(table) == []
    assert table.currentRow() == -1
    assert told == [1]


def test_rows_are_added_with_tips(qtbot: QtBot) -> None:
    table = RowTable(("Name", "Number"), "Things")
    qtbot.addWidget(table)
    table.add_rows(ROWS[:1])
    table.add_rows(ROWS[1:], [("of b", "of 2"), ("of c", "of 3")])
    assert texts(table) == list(ROWS)
    tips = [item.toolTip() for row in range(3) if (item := table.item(row, 0)) is not None]
    assert tips == [plain_tool_tip(text) for text in ("a", "of b", "of c")]


def test_tab_leaves_it_and_nothing_can_be_written(qtbot: QtBot) -> None:
    window = QWidget()
    qtbot.addWidget(window)
    table, button = RowTable(("Name", "Number"), "Things"), QPushButton("after")
    layout = QVBoxLayout(window)
    layout.addWidget(table)
    layout.addWidget(button)
    table.show_rows(ROWS, chosen=0)
    window.show()
    table.setFocus()
    QTest.keyClick(table, Qt.Key.Key_Down)
    QTest.keyClicks(table, "x")
    assert (texts(table), table.chosen_row) == (list(ROWS), 1)
    QTest.keyClick(table, Qt.Key.Key_Tab)
    assert window.focusWidget() is button
