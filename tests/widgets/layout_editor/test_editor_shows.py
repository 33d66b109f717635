"""Contents of the layout editor: lanes, state, notes, tool tips, accessible text, in both themes and at all widths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QAccessible, QColor
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QLabel
from pytestqt.qtbot import QtBot

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.planning.layout.layout import Violation
from engine.planning.layout.parts import Pin
from engine.planning.memory.side_files import Projector, SideFiles
from engine.planning.plan.preview import Preview
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.prediction import DeviceTime, SpeedForecast
from engine.planning.speed.speeds import Sending, Source
from tests.support.accessibility import interface_of
from tests.support.load_specs import holding
from tests.support.previews import (
    dense_layers,
    dense_preview,
    loaded_from,
    make_gpu,
    make_layout,
    make_preview,
    make_rig,
    moe_preview,
    patchwork_preview,
    wide_preview,
    with_edit,
    with_layout,
)
from widgets.common.elided_label import ElidedLabel
from widgets.common.palette import DARK, LIGHT, Palette
from widgets.common.text import Fonts, text_width
from widgets.layout_editor.annotations import Notes
from widgets.layout_editor.editor import EMPTY_TEXT, LayoutEditor
from widgets.layout_editor.highlights import highlights_of, pin_rects, tooltip_of
from widgets.layout_editor.lane import time_beside
from widgets.layout_editor.placement import NO_PINS, Pins, PinToggle
from widgets.layout_editor.preview_geometry import BarTarget, LayerTarget, OutputTarget
from widgets.layout_editor.texts import note_lines

MakeEditor = Callable[..., LayoutEditor]


@pytest.fixture
def make_editor(qtbot: QtBot) -> MakeEditor:
    def make(preview: Preview | None, width: int = 1000, height: int = 620, palette: Palette = DARK) -> LayoutEditor:
        editor = LayoutEditor()
        qtbot.addWidget(editor)
        editor.apply_palette(palette)
        editor.resize(width, height)
        with qtbot.waitExposed(editor):
            editor.show()
        editor.set_preview(preview)
        return editor

    return make


def texts(editor: LayoutEditor) -> str:
    return " | ".join(label.text() for label in editor.findChildren(ElidedLabel) if label.isVisible())


@pytest.mark.parametrize("palette", [DARK, LIGHT], ids=["dark", "light"])
def test_every_lane_is_painted_with_its_layers(make_editor: MakeEditor, palette: Palette) -> None:
    editor = make_editor(wide_preview(), 1000, 900, palette)
    geometry = editor.preview_geometry
    assert geometry is not None
    assert len(geometry.contents) == 8
    picture = editor.view.viewport().grab().toImage()
    ratio = picture.devicePixelRatio()
    wanted = QColor(palette.weights).rgb()
    for run in geometry.preview.layout.runs:
        left, right = geometry.track.span(run.first, run.last)
        lane = geometry.lane_of[run.device]
        y = int((geometry.lanes.track_top(lane) + geometry.lanes.dense.top + 4) * ratio)
        row = [picture.pixelColor(x, y).rgb() for x in range(int(left * ratio), int(right * ratio))]
        assert row.count(wanted) > len(row) / 3, run.device


@pytest.mark.parametrize("preview", [dense_preview(), moe_preview(), patchwork_preview()], ids=lambda p: p.model_name)
@pytest.mark.parametrize("width", [640, 1500])
def test_pictures_are_not_blank_at_any_width(make_editor: MakeEditor, preview: Preview, width: int) -> None:
    picture = make_editor(preview, width, 480).grab().toImage()
    colours = {picture.pixelColor(x, y).rgb() for x in range(0, width, 3) for y in range(0, 480, 3)}
    assert {QColor(DARK.weights).rgb(), QColor(DARK.kv).rgb(), QColor(DARK.other).rgb()} <= colours


def test_a_narrow_lane_keeps_the_id_of_its_device(qtbot: QtBot) -> None:
    fonts = Fonts()
    least = text_width("CUDA0", fonts.bold) + 8 + text_width("6.9 ms", fonts.small)
    assert time_beside("CUDA0", "6.9 ms", fonts, least) == "6.9 ms"
    assert time_beside("CUDA0", "6.9 ms", fonts, least - 1) == ""


def test_sixteen_devices_have_sixteen_lanes_to_scroll_through(make_editor: MakeEditor) -> None:
    rig = make_rig(*(make_gpu(f"RPC{index}", 4) for index in range(15)))
    preview = make_preview(rig, make_layout(32, [("RPC0", 20), (CPU_ID, 12)]), dense_layers(32))
    editor = make_editor(preview, 640, 480)
    assert editor.preview_geometry is not None
    assert len(editor.preview_geometry.contents) == 16
    assert editor.view.verticalScrollBar().maximum() > 0


def test_without_a_model_it_says_what_to_do(make_editor: MakeEditor) -> None:
    editor = make_editor(None)
    assert editor.grab().toImage().width() > 0
    assert editor.preview_geometry is None
    assert not editor.view.isVisible()
    assert texts(editor).strip(" |") == ""
    assert EMPTY_TEXT in [label.text() for label in editor.findChildren(QLabel) if label.isVisible()]


def test_the_state_follows_layout_and_settings(make_editor: MakeEditor) -> None:
    preview = dense_preview()
    editor = make_editor(preview)
    assert "not loaded" in texts(editor)
    editor.set_loaded(loaded_from(preview))
    assert "● loaded" in texts(editor)
    moved = make_layout(32, [("CUDA0", 15), ("CUDA1", 11), (CPU_ID, 6)])
    editor.set_preview(with_layout(preview, moved))
    assert "edited, not loaded" in texts(editor)
    editor.set_preview(preview)
    assert "● loaded" in texts(editor)
    longer = ContextSettings(n_ctx=preview.context.n_ctx * 2)
    editor.set_preview(with_edit(preview, context=longer))
    assert "edited, not loaded" in texts(editor)
    editor.set_preview(with_edit(preview, side_files=SideFiles(Projector(Path("mmproj.gguf"), ()))))
    assert "edited, not loaded" in texts(editor)
    editor.set_preview(preview)
    assert "● loaded" in texts(editor)
    editor.set_loaded(None)
    assert "○ not loaded" in texts(editor)


def test_measured_numbers_stand_beside_the_forecast_only_while_they_are_of_this_layout(make_editor: MakeEditor) -> None:
    preview = dense_preview()
    editor = make_editor(preview)
    loaded = loaded_from(preview, extra_bytes=24 * MIB)
    forecast = tuple(
        msgspec.structs.replace(row, overhead_bytes=MIB, need_bytes=row.need_bytes + MIB) for row in loaded.forecast
    )
    editor.set_loaded(replace(loaded, forecast=forecast))
    assert editor.preview_geometry is not None
    assert [value.row for value in editor.preview_geometry.values] == list(loaded.measured)
    forecasts = [value.forecast for value in editor.preview_geometry.values]
    assert [row and (row.overhead_bytes, row.need_bytes) for row in forecasts] == [
        (0, row.need_bytes) for row in loaded.forecast
    ], "a measurement has nothing of what a process takes besides its buffers"
    editor.set_preview(with_layout(preview, make_layout(32, [("CUDA0", 15), ("CUDA1", 11), (CPU_ID, 6)])))
    assert all(value.forecast is None for value in editor.preview_geometry.values)


def test_other_loaded_models_are_named_and_take_room_from_a_loaded_one(make_editor: MakeEditor) -> None:
    card = make_gpu("CUDA0", 24)
    layout, layers = make_layout(32, [("CUDA0", 32)]), dense_layers(32)
    alone = make_preview(make_rig(card), layout, layers)
    editor = make_editor(alone)
    editor.set_loaded(loaded_from(alone))
    beside = replace(card, free_bytes=18 * GIB, holdings=(holding("mixture", 5 * GIB),))
    editor.set_preview(make_preview(make_rig(beside), layout, layers))
    geometry = editor.preview_geometry
    assert geometry is not None
    assert "mixture uses 5.00 GiB" in tooltip_of(geometry, BarTarget(0))
    assert "free: 18.00 GiB" in tooltip_of(geometry, BarTarget(0))
    assert "holds" not in tooltip_of(geometry, BarTarget(1))


def test_violations_and_notes_are_lines_with_whole_tooltips(make_editor: MakeEditor) -> None:
    violations = tuple(Violation(f"rule_{i}", f"Rule {i} is broken. " * 6, f"Mend {i}.") for i in range(5))
    preview = dense_preview()
    report = replace(preview.report, violations=violations, probe_only="unknown architecture")
    editor = make_editor(replace(preview, report=report), 640)
    notes = editor.findChild(Notes)
    assert notes is not None
    labels = [label for label in notes.findChildren(ElidedLabel) if label.isVisible()]
    assert len(labels) == 3
    assert "Mend 0." in labels[0].text()
    assert "and 3 more" in labels[2].text()
    editor.grab()
    assert "Mend 0." in labels[0].toolTip()
    editor.set_preview(preview)
    assert not notes.isVisible()


def test_tooltips_tell_the_numbers(make_editor: MakeEditor) -> None:
    editor = make_editor(moe_preview())
    geometry = editor.preview_geometry
    assert geometry is not None

    def tip(x: float, lane: int) -> str:
        return tooltip_of(geometry, geometry.target_at(x, geometry.lanes.track_top(lane) + 20))

    x = sum(geometry.track.span(41, 41)) / 2
    assert "layer 41 on CUDA1" in tip(x, 1)
    assert "experts: 300.0 MiB" in tip(x, 1)
    assert "layer 41 on CUDA1" in tip(x, 3), "its experts lie on the host"
    assert "output layer on CUDA1" in tip(sum(geometry.track.output) / 2, 1)
    assert "token embedding" in tip(sum(geometry.track.embedding) / 2, 3)
    bar = tip(geometry.columns.bar_left + 10, 0)
    assert "RTX 3090" in bar
    assert "weights:" in bar
    assert "margin of 512.0 MiB" in bar


def test_the_header_sums_up_the_model_or_the_selection(make_editor: MakeEditor) -> None:
    editor = make_editor(dense_preview())
    labels = editor.findChildren(QLabel)
    assert "32 layers · 4.73 GiB" in [label.text() for label in labels]
    for key in (Qt.Key.Key_Home, Qt.Key.Key_Right):
        QTest.keyClick(editor.view, key)
    QTest.keyClick(editor.view, Qt.Key.Key_Right, Qt.KeyboardModifier.ShiftModifier)
    assert "layers 1–2: 292.0 MiB including KV cache" in [label.text() for label in labels]


def test_the_accessible_text_tells_the_layout(make_editor: MakeEditor) -> None:
    editor = make_editor(dense_preview())
    text = interface_of(editor.view).text(QAccessible.Text.Description)
    assert "32 layers, not loaded" in text
    assert "CUDA1: layers 16–25" in text
    assert "Output on CPU." in text


def test_a_preview_keeps_the_items_of_the_one_before(make_editor: MakeEditor) -> None:
    preview = wide_preview()
    editor = make_editor(preview)
    before = editor.view.scene().items()
    runs = [(run.device, run.length) for run in preview.layout.runs]
    runs[0], runs[1] = (runs[0][0], 12), (runs[1][0], 20)
    editor.set_preview(with_layout(preview, make_layout(126, runs)))
    assert set(editor.view.scene().items()) == set(before)
    assert editor.preview_geometry is not None
    assert editor.preview_geometry.handles[0].layer == 12


def with_speed(preview: Preview, source: Source, seconds: float = 0.04, **changes: object) -> Preview:
    """Return `preview` with a token of two parts, that of the host from `source`."""
    parts = (DeviceTime("CUDA0", seconds / 4, 0.0, "measured"), DeviceTime(CPU_ID, seconds * 3 / 4, 0.0, source))
    return replace(preview, speed=SpeedForecast(seconds, 2048, parts, source), **changes)  # type: ignore[arg-type]


def test_the_header_and_the_lanes_tell_the_speed(make_editor: MakeEditor) -> None:
    preview = dense_preview()
    editor = make_editor(with_speed(preview, "answers"))
    assert editor.speed_text == "about 25 tokens/s"
    assert editor.preview_geometry is not None
    times = {each.content.device.id: each.time for each in editor.preview_geometry.values}
    assert times == {"CUDA0": "10 ms", "CUDA1": "", CPU_ID: "30 ms"}
    editor.set_preview(with_speed(preview, "answers", 0.02, answered_per_second=46.0))
    assert editor.speed_text == "46 tokens/s measured"
    label = next(each for each in editor.findChildren(QLabel) if each.text() == editor.speed_text)
    assert "2048 tokens in the context" in label.toolTip()
    assert "CPU: 15 ms per token (from earlier answers)" in label.toolTip()
    editor.set_preview(with_speed(preview, "answers", 0.02, answered_per_second=76.0))
    assert editor.speed_text == "76 tokens/s measured, about 50 with 2048 tokens in the context"
    editor.set_preview(None)
    assert editor.speed_text == ""


def test_the_header_says_what_was_measured_and_the_tool_tip_what_a_fuller_context_costs(
    make_editor: MakeEditor,
) -> None:
    preview = with_speed(dense_preview(), "answers", 1 / 76, answered_per_second=76.0)
    assert preview.speed is not None
    speed = replace(preview.speed, n_tokens=60)
    preview = replace(preview, speed=speed, usual_speed=replace(speed, token_s=1 / 62, n_tokens=2048))
    editor = make_editor(preview)
    assert editor.speed_text == "76 tokens/s measured"
    label = next(each for each in editor.findChildren(QLabel) if each.text() == editor.speed_text)
    assert "76 tokens/s with 60 tokens in the context" in label.toolTip()
    assert "62 tokens/s with 2048 tokens in the context" in label.toolTip()
    editor.set_preview(replace(preview, answered_per_second=None))
    assert editor.speed_text == "about 76 tokens/s"


def test_a_prediction_has_two_significant_digits(make_editor: MakeEditor) -> None:
    editor = make_editor(with_speed(dense_preview(), "guess", 1 / 161849))
    assert editor.speed_text == "roughly 160000 tokens/s (not measured)"
    editor.set_preview(with_speed(dense_preview(), "answers", 1 / 153.6))
    assert editor.speed_text == "about 150 tokens/s"
    editor.set_preview(with_speed(dense_preview(), "answers", 1 / 153.6, answered_per_second=153.6))
    assert editor.speed_text == "154 tokens/s measured"


def test_the_header_tells_the_speed_of_prompts(make_editor: MakeEditor) -> None:
    preview = with_speed(dense_preview(), "measured")
    assert preview.speed is not None
    parts = (DeviceTime(CPU_ID, 0.004, 0.0, "answers"),)
    prompt = SpeedForecast(0.004, 2048, parts, "answers", is_learnt=True)
    editor = make_editor(replace(preview, speed=replace(preview.speed, prompt=prompt), answered_per_second=24.0))
    assert editor.speed_text == "24 tokens/s measured, prompt 250 tokens/s"
    label = next(each for each in editor.findChildren(QLabel) if each.text() == editor.speed_text)
    told = (
        "Predicted for a prompt of 2048 tokens: 250 tokens/s (from earlier answers, corrected by the speed of earlier"
    )
    assert f"{told} answers)." in label.toolTip()
    guessed = replace(prompt, source="guess")
    editor.set_preview(replace(preview, speed=replace(preview.speed, prompt=guessed)))
    assert editor.speed_text == "about 25 tokens/s"


def test_a_guess_is_told_as_a_guess(make_editor: MakeEditor) -> None:
    editor = make_editor(with_speed(dense_preview(), "guess"))
    assert editor.speed_text == "roughly 25 tokens/s (not measured)"
    assert editor.preview_geometry is not None
    times = {each.content.device.id: each.time for each in editor.preview_geometry.values}
    assert times == {"CUDA0": "10 ms", "CUDA1": "", CPU_ID: "~30 ms"}
    label = next(each for each in editor.findChildren(QLabel) if each.text() == editor.speed_text)
    assert "Roughly 25 tokens per second" in label.toolTip()
    assert "that were not measured: CPU" in label.toolTip()
    assert "CPU: ~30 ms per token (not measured)" in label.toolTip()
    assert "Measure Speeds" in label.toolTip()
    editor.set_preview(with_speed(dense_preview(), "guess", answered_per_second=24.0))
    assert editor.speed_text == "24 tokens/s measured"


def test_the_time_that_a_load_takes_to_send_weights_is_told(make_editor: MakeEditor) -> None:
    sent = (Sending("RPC0", 3 * GIB, 27.4), Sending("RPC1", 3 * MIB, 0.02))
    preview = replace(with_speed(dense_preview(), "measured"), sendings=sent)
    editor = make_editor(preview)
    label = next(each for each in editor.findChildren(QLabel) if each.text() == editor.speed_text)
    assert "Loading sends 3.00 GiB to RPC0, which takes about 27 s" in label.toolTip()
    assert "RPC1" not in label.toolTip(), "no time to speak of"
    (note,) = (text for text, _ in note_lines(preview) if "sends" in text)
    assert note.startswith("Loading sends 3.00 GiB to RPC0, which takes about 27 s")
    short = replace(preview, sendings=(Sending("RPC0", GIB, 4.9),))
    assert not any("sends" in text for text, _ in note_lines(short))


Key = Qt.Key


@pytest.fixture
def editor(qtbot: QtBot) -> LayoutEditor:
    editor = LayoutEditor()
    qtbot.addWidget(editor)
    editor.resize(900, 500)
    with qtbot.waitExposed(editor):
        editor.show()
    preview = dense_preview()
    n_layers = preview.layout.n_layers
    editor.set_preview(with_layout(preview, make_layout(n_layers, [(CPU_ID, 8), ("CUDA0", n_layers - 8)])))
    editor.setFocus()
    return editor


def test_the_key_asks_for_the_selected_layers_or_the_output(editor: LayoutEditor) -> None:
    asked: list[object] = []
    editor.pin_toggled.connect(asked.append)
    editor.toggle_pin()
    assert asked == [], "nothing is chosen"
    QTest.keyClick(editor.view, Key.Key_Home)
    QTest.keyClick(editor.view, Key.Key_Right, Qt.KeyboardModifier.ShiftModifier)
    QTest.keyClick(editor.view, Key.Key_P)
    QTest.keyClick(editor.view, Key.Key_Tab)
    QTest.keyClick(editor.view, Key.Key_P)
    QTest.keyClick(editor.view, Key.Key_Tab)
    editor.toggle_pin()
    assert asked == [PinToggle((0, 1)), PinToggle(None)], "a boundary cannot be pinned"


def test_pinned_layers_are_marked_in_the_lane_they_stay_in(editor: LayoutEditor) -> None:
    geometry = editor.preview_geometry
    assert geometry is not None
    pins = Pins((Pin(CPU_ID, 0, 3), Pin("gone", 5, 6), Pin("CUDA0", 30, 10_000)), "CUDA0")
    cpu, cuda, output = pin_rects(geometry, pins)
    assert cpu == geometry.block_rect(geometry.lane_of[CPU_ID], 0, 3)
    assert cuda.right() <= geometry.track.right
    assert output.left() == geometry.track.output[0]
    assert highlights_of(geometry, None, None, None, pins, has_keyboard=False).pinned == (cpu, cuda, output)
    assert pin_rects(geometry, NO_PINS) == ()


def test_the_tooltip_says_it(editor: LayoutEditor) -> None:
    geometry = editor.preview_geometry
    assert geometry is not None
    pins = Pins((Pin(CPU_ID, 0, 3),), "CUDA0")
    lane = geometry.lane_of[CPU_ID]
    assert tooltip_of(geometry, LayerTarget(2, lane), pins).endswith(
        "Pinned to CPU: automatic layouts do not move what is pinned."
    )
    assert "Pinned" not in tooltip_of(geometry, LayerTarget(4, lane), pins)
    assert "Pinned to CUDA0" in tooltip_of(geometry, OutputTarget(), pins)


def test_a_pin_is_painted(editor: LayoutEditor) -> None:
    geometry = editor.preview_geometry
    assert geometry is not None
    before = editor.view.viewport().grab().toImage()
    editor.set_pins(Pins((Pin(CPU_ID, 0, 3),)))
    rect = geometry.block_rect(geometry.lane_of[CPU_ID], 0, 3)
    point = editor.view.mapFromScene(rect.center().x(), rect.top() + 1)
    after = editor.view.viewport().grab().toImage()
    ratio = after.devicePixelRatio()
    x, y = round(point.x() * ratio), round(point.y() * ratio)
    assert before.pixelColor(x, y) != after.pixelColor(x, y)
    editor.set_pins(NO_PINS)
    assert editor.view.viewport().grab().toImage().pixelColor(x, y) == before.pixelColor(x, y)
