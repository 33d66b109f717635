"""Machine groups in the layout editor: folded and unfolded by mouse and keys, with the sum of memory."""

from __future__ import annotations

import msgspec
import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import Device, Rig
from engine.planning.layout.moves import Move, RangeMove
from engine.planning.plan.preview import DraftBlock, Preview
from tests.support.previews import dense_layers, make_gpu, make_layout, make_preview, make_rig, with_layout
from widgets.layout_editor.editor import LayoutEditor
from widgets.layout_editor.keyboard import DraftFocus, LayerFocus
from widgets.layout_editor.placement import LaneContent

MACHINES, DEVICES = 16, 4
LAYERS = 126


def lent(machine: int, device: int) -> Device:
    """Return a device of a machine; larger ones have higher numbers."""
    name, size_bytes = f"m{machine:02}", (device + 1) * 24 * GIB
    return Device(
        f"{name}-CUDA{device}",
        f"{name} · RTX 3090",
        "RPC",
        "gpu",
        size_bytes,
        size_bytes,
        endpoint=f"192.0.2.{machine + 1}:50052/CUDA{device}",
        fingerprint=f"{machine:02x}" * 32,
    )


def rig_of(machines: int = MACHINES) -> Rig:
    return make_rig(*(lent(machine, device) for machine in range(machines) for device in range(DEVICES)))


@pytest.fixture
def preview() -> Preview:
    layout = make_layout(LAYERS, [("m03-CUDA0", 40), ("m03-CUDA1", 40), ("m05-CUDA3", 46)])
    return make_preview(rig_of(), layout, dense_layers(LAYERS))


@pytest.fixture
def editor(qtbot: QtBot, preview: Preview) -> LayoutEditor:
    made = LayoutEditor()
    qtbot.addWidget(made)
    made.resize(1200, 700)
    made.set_preview(preview)
    made.show()
    return made


def lanes(editor: LayoutEditor) -> tuple[LaneContent, ...]:
    assert editor.preview_geometry is not None
    return editor.preview_geometry.contents


def names(editor: LayoutEditor) -> list[str]:
    return [content.device.id for content in lanes(editor)]


def press(editor: LayoutEditor, key: Qt.Key, held: Qt.KeyboardModifier = Qt.KeyboardModifier.NoModifier) -> None:
    QTest.keyClick(editor.view, key, held)


def test_sixty_four_devices_are_sixteen_folded_machines(editor: LayoutEditor) -> None:
    assert names(editor) == [f"m{machine:02}" for machine in range(MACHINES)] + ["CPU"]
    third = lanes(editor)[3]
    assert third.device.name == "2 of 4 devices used"
    assert third.ranges == ((0, 39), (40, 79))
    assert lanes(editor)[5].has_output


def test_a_head_has_the_sum_of_its_devices(editor: LayoutEditor, preview: Preview) -> None:
    assert editor.preview_geometry is not None
    rows = {row.id: row for row in preview.report.rows}
    own = [rows[f"m03-CUDA{device}"] for device in range(DEVICES)]
    head = editor.preview_geometry.values[3].row
    assert head is not None
    for part in ("weights_bytes", "kv_cache_bytes", "need_bytes", "total_bytes", "free_bytes"):
        assert getattr(head, part) == sum(getattr(row, part) for row in own)


def test_a_device_that_is_short_makes_its_machine_short(editor: LayoutEditor, preview: Preview) -> None:
    """Others of the machine have room enough for both."""
    short = [
        msgspec.structs.replace(row, shortfall_bytes=GIB) if row.id == "m03-CUDA0" else row
        for row in preview.report.rows
    ]
    editor.set_preview(replace(preview, report=replace(preview.report, rows=tuple(short))))
    assert editor.preview_geometry is not None
    head = editor.preview_geometry.values[3].row
    assert head is not None
    assert head.shortfall_bytes == GIB


def test_keys_unfold_and_fold(editor: LayoutEditor) -> None:
    editor.view.interaction.set_focus(LayerFocus(50, 50))
    press(editor, Qt.Key.Key_F)
    assert names(editor)[3:8] == ["m03", *(f"m03-CUDA{device}" for device in range(DEVICES))]
    assert editor.selection.layers == (50, 50)
    press(editor, Qt.Key.Key_F)
    assert names(editor)[3:5] == ["m03", "m04"]
    press(editor, Qt.Key.Key_F, Qt.KeyboardModifier.ShiftModifier)
    assert len(names(editor)) == MACHINES * (1 + DEVICES) + 1
    press(editor, Qt.Key.Key_F, Qt.KeyboardModifier.ShiftModifier)
    assert len(names(editor)) == MACHINES + 1


def test_a_click_on_a_head_unfolds_it(editor: LayoutEditor) -> None:
    assert editor.preview_geometry is not None
    y = editor.preview_geometry.lanes.track_top(3) + 5
    at = editor.view.mapFromScene(QPoint(10, int(y)))
    QTest.mouseClick(editor.view.viewport(), Qt.MouseButton.LeftButton, pos=at)
    assert "m03-CUDA2" in names(editor)
    assert "m05-CUDA3" not in names(editor)


def test_layers_go_to_the_roomiest_device_of_a_folded_machine(editor: LayoutEditor, qtbot: QtBot) -> None:
    interaction = editor.view.interaction
    interaction.set_focus(LayerFocus(0, 0))
    with qtbot.waitSignal(editor.moved) as told:
        press(editor, Qt.Key.Key_Down, Qt.KeyboardModifier.ControlModifier)
    assert told.args == [RangeMove(0, 0, "m04-CUDA3")]
    # The menu names each device, those of folded machines too.
    assert {"m00-CUDA0", "m04-CUDA1", "CPU"} <= set(interaction.destinations())


def test_the_head_of_an_unfolded_machine_takes_no_layers(editor: LayoutEditor) -> None:
    editor.view.interaction.set_focus(LayerFocus(50, 50))
    press(editor, Qt.Key.Key_F)
    assert editor.preview_geometry is not None
    assert editor.preview_geometry.drop_devices()[3:5] == (None, "m03-CUDA0")
    assert editor.preview_geometry.lane_of["m03-CUDA0"] == 4


def test_few_lanes_have_no_groups(editor: LayoutEditor) -> None:
    rig = rig_of(2)
    layout = make_layout(LAYERS, [("m00-CUDA0", 100), ("m01-CUDA1", 26)])
    editor.set_preview(make_preview(rig, layout, dense_layers(LAYERS)))
    assert names(editor) == [*rig.ids[: 2 * DEVICES], "CPU"]


def test_a_machine_is_read_out_as_a_lane(editor: LayoutEditor) -> None:
    assert "m03: layers 0–39, 40–79, " in editor.view.summary


def test_the_roomiest_device_is_the_one_with_most_to_spare(editor: LayoutEditor, preview: Preview) -> None:
    """What the layout has there already counts."""
    full = [
        msgspec.structs.replace(row, shortfall_bytes=-GIB) if row.id == "m04-CUDA3" else row
        for row in preview.report.rows
    ]
    editor.set_preview(replace(preview, report=replace(preview.report, rows=tuple(full))))
    assert editor.preview_geometry is not None
    assert editor.preview_geometry.drop_devices()[4] == "m04-CUDA2"


def test_what_is_dragged_back_to_a_folded_machine_returns_to_its_device(editor: LayoutEditor) -> None:
    interaction = editor.view.interaction
    assert editor.preview_geometry is not None
    moves: list[Move] = []
    interaction.moved.connect(moves.append)
    tops = editor.preview_geometry.lanes.track_top
    x = editor.preview_geometry.block_rect(3, 0, 0).center().x()
    interaction.press(x, tops(3) + 8, extend=False)
    interaction.pointer_moved(x, tops(8) + 8)
    interaction.pointer_moved(x, tops(3) + 8)
    assert moves == [RangeMove(0, 39, "m08-CUDA3"), RangeMove(0, 39, "m03-CUDA0")]
    assert interaction.cancel_drag()


def test_a_drag_that_empties_the_lane_of_a_missing_device_goes_on_with_the_lanes_left(qtbot: QtBot) -> None:
    """With its lane there are thirteen, so machines have head lanes. Without it machines have none."""
    rig = make_rig(
        *(lent(machine, device) for machine in range(3) for device in range(DEVICES - 1)),
        make_gpu("CUDA0", 24),
        make_gpu("CUDA1", 24),
    )
    layout = make_layout(LAYERS, [("CUDA0", 100), ("GONE", 26)])
    start = make_preview(rig, layout, dense_layers(LAYERS))
    editor = LayoutEditor()
    qtbot.addWidget(editor)
    editor.resize(1200, 700)
    editor.set_preview(start)
    editor.show()
    moves: list[Move] = []

    def answer(move: Move) -> None:
        moves.append(move)
        editor.set_preview(with_layout(start, move.apply(layout)))

    def top(name: str) -> float:
        assert editor.preview_geometry is not None
        return editor.preview_geometry.lanes.track_top(names(editor).index(name)) + 5

    editor.moved.connect(answer)
    interaction = editor.view.interaction
    assert editor.preview_geometry is not None
    x = editor.preview_geometry.block_rect(0, LAYERS - 1, LAYERS - 1).center().x()
    assert names(editor) == ["m00", "m01", "m02", "CUDA0", "CUDA1", "CPU", "GONE"]
    interaction.press(x, top("GONE"), extend=False)
    interaction.pointer_moved(x, top("CUDA1"))
    assert names(editor) == [*rig.ids]
    for name in ("CUDA1", "m00-CUDA1", "CPU", "m02-CUDA2"):
        interaction.pointer_moved(x, top(name))
    assert moves == [RangeMove(100, LAYERS - 1, name) for name in ("CUDA1", "m00-CUDA1", "CPU", "m02-CUDA2")]
    assert interaction.cancel_drag()


def test_a_draft_in_a_folded_machine_is_shown_on_its_head(editor: LayoutEditor, preview: Preview) -> None:
    draft = DraftBlock("small.gguf", ("m03-CUDA2",), 8, GIB)
    editor.set_preview(replace(preview, draft=draft))
    assert editor.preview_geometry is not None
    assert editor.preview_geometry.draft_lane == 3
    assert lanes(editor)[3].device.name == "3 of 4 devices used"
    editor.view.interaction.set_focus(DraftFocus())
    press(editor, Qt.Key.Key_F)
    assert editor.preview_geometry.draft_lane == names(editor).index("m03-CUDA2")
