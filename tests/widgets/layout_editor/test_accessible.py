"""Accessibility of the layout editor: lanes, layers, boundaries and output, at the positions where they are painted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from PySide6.QtCore import QRect, Qt
from PySide6.QtGui import QAccessible, QAccessibleInterface
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from engine.planning.plan.preview import Preview
from tests.support.accessibility import interface_of, name_of, nameless, walk
from tests.support.previews import dense_preview, make_layout, with_layout
from widgets.layout_editor.editor import LayoutEditor
from widgets.layout_editor.placement import LaneContent
from widgets.layout_editor.texts import LoadedTexts, accessible_summary

_Role = QAccessible.Role


@pytest.fixture
def editor(qtbot: QtBot) -> Iterator[LayoutEditor]:
    made = LayoutEditor()
    qtbot.addWidget(made)
    made.resize(900, 500)
    with qtbot.waitExposed(made):
        made.show()
    made.set_preview(dense_preview())
    made.setFocus()
    QAccessible.setActive(True)
    yield made
    QAccessible.setActive(False)


def children(interface: QAccessibleInterface, role: QAccessible.Role) -> list[QAccessibleInterface]:
    found = (interface.child(index) for index in range(interface.childCount()))
    return [each for each in found if each is not None and each.role() is role]


def test_lanes_hold_their_layers_and_boundaries_say_what_they_part(editor: LayoutEditor) -> None:
    view = interface_of(editor.view)
    lanes = children(view, _Role.List)
    assert [name_of(each).split(",")[0] for each in lanes] == [
        "Lane CUDA0: layers 0–15",
        "Lane CUDA1: layers 16–25",
        "Lane CPU: layers 26–31 + output",
    ]
    assert [lane.childCount() for lane in lanes] == [16, 10, 7]
    last = lanes[2].child(6)
    assert last is not None
    assert name_of(last) == "output on CPU, 400.0 MiB"
    assert name_of(lanes[1].child(0)) == "layer 16 on CUDA1, 146.0 MiB"
    assert [name_of(each) for each in children(view, _Role.Splitter)] == [
        "boundary CUDA0 0–15 | CUDA1 16–25",
        "boundary CUDA1 16–25 | CPU 26–31",
    ]
    assert nameless(editor.view) == []


def test_the_tree_is_whole(editor: LayoutEditor) -> None:
    """What a child says of its parent is what the parent says of its child."""
    whole = list(walk(interface_of(editor.view)))
    assert len(whole) == 1 + 3 + 32 + 1 + 2
    for each in whole:
        for index in range(each.childCount()):
            child = each.child(index)
            assert child is not None
            assert each.indexOfChild(child) == index
            above = child.parent()
            assert above is not None
            assert above.object() is each.object()
    assert interface_of(editor.view).child(99) is None


def test_everything_is_where_it_is_painted(editor: LayoutEditor) -> None:
    view = interface_of(editor.view)
    whole = QRect(editor.view.mapToGlobal(editor.view.rect().topLeft()), editor.view.size())
    assert view.rect() == whole
    seen = [each.rect() for lane in children(view, _Role.List) for each in (lane, *children(lane, _Role.ListItem))]
    assert all(not rect.isEmpty() and whole.intersects(rect) for rect in seen)
    first = children(view, _Role.List)[0]
    layers = children(first, _Role.ListItem)
    assert [layer.rect().left() for layer in layers] == sorted({layer.rect().left() for layer in layers})
    found = first.childAt(layers[3].rect().center().x(), layers[3].rect().center().y())
    assert found is not None
    assert name_of(found).startswith("layer 3 ")


def test_the_keyboard_is_where_the_screen_reader_hears_it(editor: LayoutEditor) -> None:
    view = interface_of(editor.view)
    heard = []
    for keys in ((Qt.Key.Key_Tab,), (Qt.Key.Key_Left,), (Qt.Key.Key_End, Qt.Key.Key_Tab)):
        for key in keys:
            QTest.keyClick(editor.view, key)
        focused = view.focusChild()
        assert focused is not None
        assert focused.state().focused
        heard.append(name_of(focused).split(",")[0])
    assert heard == ["boundary CUDA0 0–15 | CUDA1 16–25", "layer 15 on CUDA0", "output on CPU"]
    QTest.keyClick(editor.view, Qt.Key.Key_Home)
    QTest.keyClick(editor.view, Qt.Key.Key_Right, Qt.KeyboardModifier.ShiftModifier)
    layers = children(children(view, _Role.List)[0], _Role.ListItem)
    assert [index for index, each in enumerate(layers) if each.state().selected] == [0, 1]


def test_a_part_follows_the_layout_and_ends_with_it(editor: LayoutEditor) -> None:
    view = interface_of(editor.view)
    boundary = children(view, _Role.Splitter)[1]
    layer = children(view, _Role.List)[2].child(0)
    assert layer is not None
    assert name_of(layer).startswith("layer 26 on CPU")
    editor.set_preview(with_layout(dense_preview(), make_layout(32, [("CUDA0", 12), ("CUDA1", 20)])))
    assert name_of(layer).startswith("layer 26 on CUDA1")
    lane = layer.parent()
    assert lane is not None
    assert name_of(lane).startswith("Lane CUDA1: layers 12–31")
    assert boundary.state().invalid
    assert name_of(boundary) == ""
    assert boundary.rect().isEmpty()
    editor.set_preview(None)
    assert view.childCount() == 0
    assert layer.state().invalid


def test_a_drag_makes_no_summary_unless_a_screen_reader_asks(
    editor: LayoutEditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentences on all lanes are made for each question, not for each frame."""
    made: list[str] = []

    def count(preview: Preview, lanes: Sequence[LaneContent], state: LoadedTexts) -> str:
        made.append(accessible_summary(preview, lanes, state))
        return made[-1]

    monkeypatch.setattr("widgets.layout_editor.view.accessible_summary", count)
    QAccessible.setActive(False)
    for first in range(10, 15):
        editor.set_preview(with_layout(dense_preview(), make_layout(32, [("CUDA0", first), ("CUDA1", 32 - first)])))
    assert made == []
    described = interface_of(editor.view).text(QAccessible.Text.Description)
    assert "CUDA0: layers 0–13" in described
    assert len(made) == 1
