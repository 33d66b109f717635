"""Placing experts in the window: by number, all to the CPU and back, and by a pasted line, each as one undo step."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from app.models.expert_placing import TO_CPU, ExpertPlacing
from app.window.layout.layout_presenter import outcome_text
from app.wiring import WindowObjects
from engine.devices.device import CPU_ID
from engine.model.gguf.reader import read_model
from engine.planning.fit.expert_moves import ExpertOutcome
from engine.planning.layout.layout import Layout, Override, make_layout
from engine.planning.layout.moves import PartMove
from engine.planning.layout.parts import PartPin
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.prediction import SpeedForecast
from tests.support.models import write_tiny_moe
from tests.support.previews import make_gpu, make_rig
from tests.support.windows import WindowOpener
from widgets.layout_editor.number_bar import ExpertCount
from widgets.layout_editor.placement import PinToggle

START = make_layout(8, ["CUDA0"] * 4 + ["CUDA1"] * 4)


@pytest.fixture
def window(open_window: WindowOpener, qtbot: QtBot, tmp_path: Path) -> WindowObjects:
    opened = open_window()
    opened.main.resize(1200, 800)
    model = read_model(write_tiny_moe(tmp_path / "moe.gguf", n_layers=8))
    rig = make_rig(make_gpu("CUDA0", 8), make_gpu("CUDA1", 8))
    opened.desk.document.open(model, rig, Edit(START, ContextSettings(n_ctx=512)))
    qtbot.waitUntil(lambda: opened.main.editor.preview_geometry is not None)
    return opened


def layout_of(window: WindowObjects) -> Layout:
    assert window.desk.document.edit is not None
    return window.desk.document.edit.layout


def wait_for(qtbot: QtBot, window: WindowObjects, overrides: tuple[Override, ...]) -> None:
    qtbot.waitUntil(lambda: layout_of(window).overrides == overrides)


def test_all_experts_go_to_the_cpu_and_come_back(window: WindowObjects, qtbot: QtBot) -> None:
    window.main.editor.experts_requested.emit("to_cpu")
    wait_for(qtbot, window, (Override(CPU_ID, "experts"),))
    assert window.desk.document.undo_group.undoText() == "move experts to the CPU"
    window.main.editor.experts_requested.emit("back")
    wait_for(qtbot, window, ())
    window.desk.document.undo_group.undo()
    assert layout_of(window).overrides == (Override(CPU_ID, "experts"),)


def test_a_number_of_experts_is_one_step_of_undo(window: WindowObjects, qtbot: QtBot) -> None:
    window.main.editor.numbers.experts_entered.emit(ExpertCount(CPU_ID, 3))
    qtbot.waitUntil(lambda: bool(layout_of(window).overrides))
    (override,) = layout_of(window).overrides
    assert override.layers in (range(3), range(5, 8))
    assert window.desk.document.undo_group.undoText() == "place experts of 3 layers on CPU"
    window.desk.document.undo_group.undo()
    assert layout_of(window) == START


def test_a_found_layout_is_not_for_another_model(window: WindowObjects, qtbot: QtBot, tmp_path: Path) -> None:
    document = window.desk.document
    placing = ExpertPlacing(document, window.desk.background, window.desk.notices)
    other = read_model(write_tiny_moe(tmp_path / "other.gguf", n_layers=8))
    rig = make_rig(make_gpu("CUDA0", 8), make_gpu("CUDA1", 8))
    qtbot.waitUntil(lambda: not document.is_behind)
    placing.use(TO_CPU)
    document.open(other, rig, Edit(START, ContextSettings(n_ctx=512)))
    qtbot.waitUntil(lambda: not placing._placing.is_running)
    assert layout_of(window) == START


def test_a_drag_of_experts_is_one_step_of_undo_by_its_name(window: WindowObjects) -> None:
    window.main.editor.moved.emit(PartMove("experts", 0, 3, "CUDA1"))
    window.main.editor.moved.emit(PartMove("experts", 0, 3, CPU_ID))
    window.main.editor.move_finished.emit()
    assert layout_of(window).overrides == (Override(CPU_ID, "experts", 0, 3),)
    assert window.desk.document.undo_group.undoText() == "move experts"
    window.desk.document.undo_group.undo()
    assert layout_of(window) == START


def test_the_menu_of_a_layer_gets_bytes_and_speed(window: WindowObjects, qtbot: QtBot) -> None:
    view = window.main.editor.view
    view.setFocus()
    QTest.keyClick(view, Qt.Key.Key_Home)
    menu = view.context_menu()
    to_cpu, back = view.expert_actions.values()
    qtbot.waitUntil(lambda: "tokens/s" in to_cpu.text())
    assert not back.isEnabled()
    menu.deleteLater()


def test_a_line_places_the_model_and_names_what_was_left_out(window: WindowObjects, qtbot: QtBot) -> None:
    numbers = window.main.editor.numbers
    window.main.editor.toggle_numbers()
    numbers.line.setText("-ngl 99 -ts 0,1 --bogus --n-cpu-moe 2")
    QTest.keyClick(numbers.line, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: layout_of(window) != START)
    assert layout_of(window).runs[0].device == "CUDA1"
    assert layout_of(window).overrides == (Override(CPU_ID, "experts", 0, 1),)
    assert numbers.answer == "Layers: CUDA1 8. Not imported, because Layerdeck does not know these options: --bogus."
    assert numbers.line.text() == ""
    window.desk.document.undo_group.undo()
    assert layout_of(window) == START


def test_a_line_that_cannot_be_taken_stays_and_changes_nothing(window: WindowObjects, qtbot: QtBot) -> None:
    numbers = window.main.editor.numbers
    window.main.editor.toggle_numbers()
    numbers.line.setText("0,0")
    QTest.keyClick(numbers.line, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: bool(numbers.answer))
    assert numbers.answer == "The shares add up to 0; give at least one device a share above 0."
    assert numbers.line.text() == "0,0"
    assert layout_of(window) == START


def test_a_line_of_which_nothing_is_known_stays(window: WindowObjects, qtbot: QtBot) -> None:
    numbers = window.main.editor.numbers
    window.main.editor.toggle_numbers()
    numbers.line.setText("banana -ngl x")
    QTest.keyClick(numbers.line, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: bool(numbers.answer))
    assert numbers.answer == (
        "The layout was not changed. "
        'Layerdeck cannot read -ngl "x", so this option was not imported. '
        "Not imported, because Layerdeck does not know these options: banana."
    )
    assert numbers.line.text() == "banana -ngl x"
    assert layout_of(window) == START


def test_pinned_experts_are_stored_and_released(window: WindowObjects) -> None:
    layouts = window.desk.auto_layouts
    window.main.editor.moved.emit(PartMove("experts", 0, 1, CPU_ID))
    window.main.editor.move_finished.emit()
    window.main.editor.pin_toggled.emit(PinToggle((0, 4), "experts"))
    pins = (
        PartPin(CPU_ID, "experts", 0, 1),
        PartPin("CUDA0", "experts", 2, 3),
        PartPin("CUDA1", "experts", 4, 4),
    )
    assert layouts.pins.parts == pins
    layouts.toggle_pin(PinToggle((0, 4), "experts"))
    assert not layouts.pins.parts


def test_outcomes_in_words() -> None:
    speed = SpeedForecast(0.1, 0, (), "measured")
    faster = SpeedForecast(0.05, 0, (), "measured")
    mib = 1 << 20
    assert outcome_text(ExpertOutcome(0, 0, fits=True)) == ""
    assert outcome_text(ExpertOutcome(2, mib, fits=False)) == "moves 1.0 MiB; does not fit"
    assert outcome_text(ExpertOutcome(2, mib, fits=True)) == "1.0 MiB"
    assert (
        outcome_text(ExpertOutcome(2, mib, True, None, speed)) == "moves 1.0 MiB; would fit, with roughly 10 tokens/s"
    )
    assert outcome_text(ExpertOutcome(2, mib, True, speed, faster)) == "moves 1.0 MiB; roughly 10 → 20 tokens/s"
