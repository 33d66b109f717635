"""The number fields above the lanes: shown numbers, typed numbers, and the pasted line."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.planning.layout.layout import single_device
from engine.planning.layout.moves import CountMove
from tests.support.previews import (
    dense_preview,
    make_gpu,
    make_layout,
    make_preview,
    make_rig,
    moe_layers,
    moe_preview,
    with_layout,
)
from widgets.layout_editor.editor import LayoutEditor
from widgets.layout_editor.geometry import MIN_PITCH
from widgets.layout_editor.number_bar import ExpertCount


@pytest.fixture
def editor(qtbot: QtBot) -> LayoutEditor:
    made = LayoutEditor()
    qtbot.addWidget(made)
    made.resize(1000, 620)
    with qtbot.waitExposed(made):
        made.show()
    made.set_preview(moe_preview())
    made.toggle_numbers()
    return made


def test_the_fields_show_layers_and_experts_of_each_device(editor: LayoutEditor) -> None:
    found = {device: tuple(each.value() for each in editor.numbers.fields(device)) for device in ("CUDA0", "RPC0")}
    assert found == {"CUDA0": (29, 28), "RPC0": (0, 0)}, "the first layer has no experts"
    layers, experts = editor.numbers.fields(CPU_ID)
    assert (layers.value(), experts.value(), experts.minimum()) == (4, 8, 4), "it keeps those of its own layers"
    assert layers.accessibleName() == "Layers on CPU"
    assert experts.accessibleName() == "Layers whose experts are on CPU"


def test_a_number_of_layers_is_one_finished_move(editor: LayoutEditor) -> None:
    said: list[object] = []
    editor.moved.connect(said.append)
    editor.move_finished.connect(lambda: said.append("finished"))
    field = editor.numbers.fields("CUDA1")[0]
    field.setFocus()
    field.selectAll()
    QTest.keyClicks(field, "12")
    assert said == [], "it is still being typed"
    QTest.keyClick(field, Qt.Key.Key_Return)
    assert said == [CountMove("CUDA1", 12), "finished"]


def test_a_number_of_experts_is_asked_for(editor: LayoutEditor) -> None:
    said: list[ExpertCount] = []
    editor.numbers.experts_entered.connect(said.append)
    editor.numbers.fields("CUDA0")[1].setValue(20)
    assert said == [ExpertCount("CUDA0", 20)]


def test_no_number_is_above_the_layers_and_a_lone_cpu_gives_none_away(editor: LayoutEditor) -> None:
    assert editor.numbers.fields("CUDA0")[0].maximum() == 48
    assert editor.numbers.fields("CUDA0")[1].maximum() == 47
    preview = dense_preview()
    editor.set_preview(with_layout(preview, single_device(32, CPU_ID)))
    layers, experts = editor.numbers.fields(CPU_ID)
    assert not layers.isEnabled()
    assert experts.isHidden(), "a dense model has no experts"


def test_a_preview_says_nothing_and_a_number_that_is_typed_stays(editor: LayoutEditor) -> None:
    said: list[object] = []
    editor.moved.connect(said.append)
    editor.numbers.experts_entered.connect(said.append)
    field = editor.numbers.fields("CUDA0")[0]
    field.setFocus()
    field.selectAll()
    QTest.keyClicks(field, "2")
    editor.set_preview(moe_preview())
    assert field.text() == "2"
    assert said == []


def test_in_mode_tensor_the_shares_have_fields_of_their_own(editor: LayoutEditor) -> None:
    preview = dense_preview()
    layout = preview.layout.with_split_mode("tensor")
    editor.set_preview(replace(preview, edit=replace(preview.edit, layout=layout)))
    assert not editor.numbers.fields("CUDA0")[0].isVisible()
    assert editor.numbers.line.isVisible()


def test_a_line_is_said_with_return_and_its_answer_goes_with_the_next(editor: LayoutEditor) -> None:
    said: list[str] = []
    editor.numbers.line_entered.connect(said.append)
    assert editor.numbers.line.hasFocus(), "the command leads to the line"
    QTest.keyClick(editor.numbers.line, Qt.Key.Key_Return)
    QTest.keyClicks(editor.numbers.line, " 3,1,2 ")
    QTest.keyClick(editor.numbers.line, Qt.Key.Key_Return)
    assert said == ["3,1,2"]
    editor.numbers.show_answer("There is no share.", bad=True)
    assert editor.numbers.answer == "There is no share."
    QTest.keyClicks(editor.numbers.line, "4")
    assert editor.numbers.answer == ""


def test_numbers_are_hidden_until_they_are_wanted(qtbot: QtBot) -> None:
    editor = LayoutEditor()
    qtbot.addWidget(editor)
    editor.show()
    editor.set_preview(moe_preview())
    assert editor.numbers.isHidden()
    editor.toggle_numbers()
    assert not editor.numbers.isHidden()
    editor.toggle_numbers()
    assert editor.numbers.isHidden()


def test_a_low_editor_shows_the_line_a_row_of_fields_and_a_lane(qtbot: QtBot) -> None:
    """Eight cards have several rows of fields; they scroll, and the lanes stay."""
    rig = make_rig(*(make_gpu(f"CUDA{number}", 24) for number in range(8)))
    editor = LayoutEditor()
    qtbot.addWidget(editor)
    editor.set_preview(make_preview(rig, make_layout(40, [("CUDA0", 40)]), moe_layers(40)))
    editor.toggle_numbers()
    editor.resize(editor.minimumSizeHint())
    with qtbot.waitExposed(editor):
        editor.show()
    assert editor.minimumSizeHint().height() <= 300, "docks take the rest of a window that is 800 pixels high"
    view = editor.view
    assert view.viewport().height() >= MIN_PITCH, "a lane is visible"
    numbers = editor.numbers
    assert numbers.rect().contains(numbers.line.geometry())
    assert numbers.geometry().bottom() < view.mapTo(editor, view.rect().topLeft()).y()
    last = numbers.fields("CUDA7")[0]
    before = last.previousInFocusChain()
    assert before is not None
    before.setFocus()
    QTest.keyClick(before, Qt.Key.Key_Tab)
    qtbot.waitUntil(lambda: not last.visibleRegion().isEmpty())
    editor.resize(1000, 700)
    qtbot.waitUntil(lambda: not numbers.fields("CUDA0")[0].visibleRegion().isEmpty())
    qtbot.waitUntil(lambda: not last.visibleRegion().isEmpty())
    assert not numbers.fields("CUDA0")[0].visibleRegion().isEmpty(), "a high editor shows all of them"


def test_the_heading_shows_the_whole_state_beside_a_long_summary(editor: LayoutEditor) -> None:
    editor.resize(560, 400)
    state = editor._state
    assert state.shown_text() == state.text()
