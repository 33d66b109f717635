"""A layout that places items side by side in as many lines as needed."""

from __future__ import annotations

import pytest
from PySide6.QtWidgets import QSizePolicy, QWidget
from pytestqt.qtbot import QtBot

from widgets.common.wrap_layout import WrapLayout


class Box(QWidget):
    """A widget of a fixed size, or one that may grow from it."""

    def __init__(self, width: int, *, grows_to: int | None = None) -> None:
        super().__init__()
        self.setMinimumWidth(width)
        self.setFixedHeight(20)
        if grows_to is None:
            self.setFixedWidth(width)
        else:
            self.setMaximumWidth(grows_to)
            self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)


class Host(QWidget):
    """A shown widget of `width` with boxes in a wrap layout."""

    def __init__(self, qtbot: QtBot, width: int, *boxes: Box) -> None:
        super().__init__()
        qtbot.addWidget(self)
        self.wrap = WrapLayout(self, spacing=10)
        for box in boxes:
            self.wrap.addWidget(box)
        self.resize(width, self.wrap.heightForWidth(width))
        self.show()


@pytest.mark.parametrize(("width", "lines"), [(320, 1), (319, 2), (210, 2), (209, 3), (100, 3), (40, 3)])
def test_lines_break_where_the_width_ends(qtbot: QtBot, width: int, lines: int) -> None:
    boxes = [Box(100) for _ in range(3)]
    host = Host(qtbot, width, *boxes)

    assert host.wrap.heightForWidth(width) == 20 * lines + 10 * (lines - 1)
    assert len({box.y() for box in boxes}) == lines


def test_an_item_that_grows_takes_what_its_line_leaves(qtbot: QtBot) -> None:
    growing, fixed = Box(50, grows_to=120), Box(100)
    wide = Host(qtbot, 240, growing, fixed)

    assert growing.width() == 120
    assert fixed.x() == 130
    assert wide.wrap.sizeHint().width() <= 240

    growing, fixed = Box(50, grows_to=120), Box(100)
    narrow = Host(qtbot, 170, growing, fixed)
    assert growing.width() == 60
    assert narrow.wrap.minimumSize().width() == 100
    assert fixed.geometry().right() < 170


def test_hidden_items_take_no_room(qtbot: QtBot) -> None:
    boxes = [Box(100) for _ in range(3)]
    host = Host(qtbot, 320, *boxes)

    boxes[1].hide()
    host.wrap.activate()

    assert boxes[2].x() == 110
    assert host.wrap.sizeHint().width() == 210


def test_items_can_be_taken_out(qtbot: QtBot) -> None:
    boxes = [Box(100) for _ in range(2)]
    host = Host(qtbot, 320, *boxes)
    layout = host.wrap

    assert layout.count() == 2
    item = layout.takeAt(0)
    assert item is not None
    assert item.widget() is boxes[0]
    assert (layout.count(), layout.itemAt(5), layout.takeAt(5)) == (1, None, None)
