"""The dialog that compares two layouts, and the lanes in it."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QEvent, QPoint
from PySide6.QtGui import QHelpEvent
from PySide6.QtWidgets import QApplication, QToolTip
from pytestqt.qtbot import QtBot

from engine.base.values import replace
from engine.planning.layout.parts import place_embedding, place_part
from engine.planning.plan.comparison import Comparison, Costs, DeviceChange, Side, ValueChange
from engine.planning.plan.figures import Figures
from engine.planning.plan.preview import Preview
from tests.support.previews import dense_layers, make_gpu, make_layout, make_preview, make_rig, moe_layers
from widgets.common.palette import LIGHT
from widgets.layout_editor.compared_lanes import ComparedLanes, compared_lanes
from widgets.layout_editor.comparison_dialog import ComparisonDialog, ShownSide, SideOption

RIG = make_rig(make_gpu("CUDA0", 24), make_gpu("CUDA1", 12))


def preview(runs: list[tuple[str, int]], *, experts: bool = False) -> Preview:
    n_layers = sum(length for _, length in runs)
    layers = moe_layers(n_layers) if experts else dense_layers(n_layers)
    return make_preview(RIG, make_layout(n_layers, runs), layers)


def side(shown: Preview, *advice: str) -> ShownSide:
    figures = Figures(fits=True, n_host_layers=0, n_layers=4, n_ctx=512, speed=None)
    return ShownSide(shown, Side(figures, Costs(2, 1024, 0), shown.report.rows, None, advice))


def test_layers_that_one_layout_has_alone_are_marked_in_its_lane() -> None:
    lanes = {lane.id: lane for lane in compared_lanes(preview([("CUDA0", 8)]), preview([("CUDA0", 5), ("CUDA1", 3)]))}
    assert lanes["CUDA0"].only[0]["dense"] == {5, 6, 7}
    assert lanes["CUDA0"].only[1] == {}
    assert lanes["CUDA1"].only[1]["kv"] == {5, 6, 7}
    assert lanes["CUDA0"].ends == ((False, True), (False, False)), "the output was on CUDA0"
    assert lanes["CUDA1"].ends == ((False, False), (False, True))
    assert not lanes["CPU"].differs


def test_a_moved_part_is_marked_alone() -> None:
    one = preview([("CUDA0", 4)], experts=True)
    moved = place_embedding(place_part(one.layout, "experts", 2, 3, "CPU"), "CUDA1")
    lanes = {lane.id: lane for lane in compared_lanes(one, replace(one, edit=replace(one.edit, layout=moved)))}
    moved_layers = frozenset({2, 3})
    assert lanes["CUDA0"].only[0] == {"experts": moved_layers}
    assert lanes["CPU"].only[1] == {"experts": moved_layers}
    assert not lanes["CUDA0"].only[1]
    assert not lanes["CPU"].only[0]
    assert lanes["CUDA1"].ends == ((False, False), (True, False))


def test_the_same_layout_and_a_side_without_one_have_no_marks() -> None:
    one = preview([("CUDA0", 4)])
    assert not any(lane.differs for lane in compared_lanes(one, one))
    assert not any(lane.differs for lane in compared_lanes(one, None))
    assert compared_lanes(None, None) == ()


def test_devices_of_both_rigs_have_a_lane() -> None:
    rig = make_rig(make_gpu("CUDA0", 24), make_gpu("CUDA7", 80))
    there = make_preview(rig, make_layout(4, [("CUDA7", 4)]), dense_layers(4))
    lanes = {lane.id: lane for lane in compared_lanes(preview([("CUDA0", 4)]), there)}
    assert set(lanes) == {"CUDA0", "CUDA1", "CPU", "CUDA7"}
    assert lanes["CUDA7"].contents[0] is None
    assert lanes["CUDA1"].contents[1] is None


@pytest.mark.parametrize("count", [1, 64])
def test_many_layers_and_lanes_are_painted_and_scroll(qtbot: QtBot, count: int) -> None:
    rig = make_rig(*(make_gpu(f"CUDA{number}", 24) for number in range(count)))
    one = make_preview(rig, make_layout(126, [("CUDA0", 126)]), moe_layers(126))
    widget = ComparedLanes()
    qtbot.addWidget(widget)
    widget.resize(1000, 300)
    widget.apply_palette(LIGHT)
    widget.show_sides(one, None)
    widget.show()
    assert len(widget.lanes) == count + 1
    before = widget.grab().toImage()
    assert widget.verticalScrollBar().maximum() > 0 if count == 64 else True
    widget.show_sides(None, None)
    assert widget.grab().toImage() != before


def test_screen_readers_are_told_where_the_layouts_differ(qtbot: QtBot) -> None:
    widget = ComparedLanes()
    qtbot.addWidget(widget)
    widget.show_sides(preview([("CUDA0", 8)]), preview([("CUDA0", 5), ("CUDA1", 3)]))
    assert widget.accessibleDescription() == "The layouts differ on CUDA0, CUDA1."


def test_a_tooltip_has_the_layers_of_both(qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(QToolTip, "showText", lambda _at, text, *_rest: told.append(text))
    widget = ComparedLanes()
    qtbot.addWidget(widget)
    widget.resize(900, 300)
    widget.show_sides(preview([("CUDA0", 8)]), preview([("CUDA0", 5), ("CUDA1", 3)]))
    canvas = widget.widget()
    assert canvas is not None
    for point in (QPoint(200, 10), QPoint(880, 10)):
        QApplication.sendEvent(canvas, QHelpEvent(QEvent.Type.ToolTip, point, point))
    assert "A: layers 0–7<br>B: layers 0–4" in told[0]
    assert "weights" in told[1]


@pytest.fixture
def dialog(qtbot: QtBot) -> ComparisonDialog:
    made = ComparisonDialog()
    qtbot.addWidget(made)
    return made


def test_the_dialog_shows_figures_memory_and_differences(dialog: ComparisonDialog) -> None:
    dialog.show_side(0, side(preview([("CUDA0", 4)])))
    assert dialog.take_buttons[0].isEnabled()
    assert not dialog.take_buttons[1].isEnabled()
    dialog.show_side(1, side(preview([("CUDA1", 4)]), "The output is on the CPU."))
    dialog.show_differences(
        Comparison((DeviceChange("layer", 0, 3, "CUDA0", "CUDA1"),), (ValueChange("n_ctx", "context", "512", "1024"),))
    )
    first = [dialog.figures.item(row, 0) for row in range(dialog.figures.rowCount())]
    names = [item.text() for item in first if item is not None]
    assert names[0] == "Fits"
    assert names[-2:] == ["CUDA0", "CUDA1"]
    cells = [[item.text() for column in range(3) if (item := dialog.differences.item(row, column))] for row in range(2)]
    assert cells == [["Layers 0-3", "CUDA0", "CUDA1"], ["Context", "512", "1024"]]
    assert dialog.notes_label.text() == "B: The output is on the CPU."


def test_equal_layouts_are_told(dialog: ComparisonDialog) -> None:
    dialog.show_side(0, side(preview([("CUDA0", 4)])))
    dialog.show_side(1, side(preview([("CUDA0", 4)])))
    dialog.show_differences(Comparison((), ()))
    item = dialog.differences.item(0, 0)
    assert item is not None
    assert item.text() == "The layouts are equal."


def test_only_the_user_chooses_a_side(dialog: ComparisonDialog, qtbot: QtBot) -> None:
    options = [SideOption("current", "current layout"), SideOption("loaded", "last load")]
    asked: list[tuple[int, str]] = []
    dialog.chosen.connect(lambda number, key: asked.append((number, key)))
    dialog.set_options(options, ("current", "loaded"))
    assert [box.currentText() for box in dialog.boxes] == ["current layout", "last load"]
    assert asked == []
    dialog.boxes[1].activated.emit(0)
    assert asked == [(1, "current")]
    dialog.show_side(1, side(preview([("CUDA0", 4)])))
    with qtbot.waitSignal(dialog.take_requested) as taken:
        dialog.take_buttons[1].click()
    assert taken.args == [1]
