"""Constraints and pins of automatic layouts in the window: stored, marked and obeyed; speeds learnt from answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from pytestqt.qtbot import QtBot

from app.models.auto_layouts import StoredPins
from app.paths import speeds_path
from app.rig.device_list import list_of_file
from app.wiring import WindowObjects
from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, MeasuredChoice, Rig
from engine.devices.rig_file import encode_rig
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.fit.speed_book import read_speed_book, write_speed_book
from engine.planning.fit.strategies.constraints import AutoLayout
from engine.planning.layout.layout import make_layout, single_device
from engine.planning.layout.layout_file import LayoutFile, write_layout
from engine.planning.layout.parts import Pin
from engine.planning.plan.edit import Edit
from engine.planning.plan.preview import LoadedLayout
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.answers import TokenTiming
from engine.runtime.session.events import Done
from tests.support.models import write_header_only
from tests.support.previews import make_gpu, make_rig
from widgets.controls.values import AutoOptions
from widgets.devices.limits import DeviceLimits
from widgets.layout_editor.placement import NO_PINS, Pins, PinToggle

OpenWindow = Callable[[], WindowObjects]


def show_model(window: WindowObjects, qtbot: QtBot, folder: Path) -> ModelFile:
    """Show a model on the CPU and one of two cards."""
    path = write_header_only(folder / "model.gguf", n_layers=16, n_embd=2048, n_head=16, n_ff=8192, n_vocab=4096)
    model, rig = read_model(path), make_rig(make_gpu("CUDA0", 12), make_gpu("CUDA1", 16))
    (folder / "rig.json").write_bytes(encode_rig(rig))
    with qtbot.waitSignal(window.desk.rig.live.rig_changed):
        window.desk.rig.files.open(folder / "rig.json")
    layout = make_layout(16, [CPU_ID] * 4 + ["CUDA0"] * 12)
    window.desk.document.open(model, rig, Edit(layout, ContextSettings()))
    window.desk.opener.model_changed.emit(model)
    return model


def edit_of(window: WindowObjects) -> Edit:
    edit = window.desk.document.edit
    assert edit is not None
    return edit


def find(window: WindowObjects, qtbot: QtBot, strategy: str) -> Edit:
    with qtbot.waitSignal(window.desk.auto_layouts.found):
        window.actions[f"auto_{strategy}"].trigger()
    return edit_of(window)


def test_pinned_layers_stay_through_every_layout_and_undo(
    open_window: OpenWindow, qtbot: QtBot, tmp_path: Path
) -> None:
    window = open_window()
    show_model(window, qtbot, tmp_path)
    before = edit_of(window)
    layouts = window.desk.auto_layouts
    window.main.editor.pin_toggled.emit(PinToggle((2, 3)))
    window.main.editor.pin_toggled.emit(PinToggle((4, 5)))
    window.main.editor.pin_toggled.emit(PinToggle(None))
    assert layouts.pins == Pins((Pin(CPU_ID, 2, 3), Pin("CUDA0", 4, 5)), "CUDA0")
    for strategy in ("fewest", "balanced", "fastest"):
        found = find(window, qtbot, strategy).layout
        assert found.assignment()[2:6] == (CPU_ID, CPU_ID, "CUDA0", "CUDA0")
        assert found.output_device == "CUDA0"
        window.actions["undo"].trigger()
        assert edit_of(window) == before
    window.actions["release_pins"].trigger()
    assert layouts.pins == NO_PINS
    assert CPU_ID not in find(window, qtbot, "fewest").layout.devices


def test_a_second_press_lets_go(open_window: OpenWindow, qtbot: QtBot, tmp_path: Path) -> None:
    window = open_window()
    show_model(window, qtbot, tmp_path)
    layouts = window.desk.auto_layouts
    layouts.toggle_pin(PinToggle((0, 6)))
    assert layouts.pins.layers == (Pin(CPU_ID, 0, 3), Pin("CUDA0", 4, 6))
    layouts.toggle_pin(PinToggle((5, 5)))
    assert [(pin.first, pin.last) for pin in layouts.pins.layers] == [(0, 3), (4, 4), (6, 6)]
    layouts.toggle_pin(PinToggle((4, 6)))
    assert layouts.pins.layers == (Pin(CPU_ID, 0, 3), Pin("CUDA0", 4, 6))
    layouts.toggle_pin(PinToggle(None))
    layouts.toggle_pin(PinToggle(None))
    assert layouts.pins.output is None


def test_pins_that_another_window_has_set_stay(open_window: OpenWindow, qtbot: QtBot, tmp_path: Path) -> None:
    window = open_window()
    model = show_model(window, qtbot, tmp_path)
    theirs = (("CUDA1", 0, 1),)
    window.desk.settings.keep("pins", StoredPins({"/other.gguf": theirs}))
    window.desk.auto_layouts.toggle_pin(PinToggle((4, 5)))
    kept = window.desk.settings.kept("pins", StoredPins)
    assert kept is not None
    assert kept.layers == {"/other.gguf": theirs, str(model.paths[0]): (("CUDA0", 4, 5),)}


def test_options_that_another_window_has_set_stay(open_window: OpenWindow) -> None:
    desk = open_window().desk
    settings, layouts = desk.settings, desk.auto_layouts
    settings.keep("auto_layout", AutoOptions(strategy="priority", order=("CUDA1", "CUDA0")))
    layouts.set_options(AutoOptions(split=True))
    assert layouts.options == AutoOptions(split=True), "this window uses what it shows"
    assert settings.kept("auto_layout", AutoOptions) == AutoOptions("priority", ("CUDA1", "CUDA0"), split=True)


def test_options_and_pins_survive(open_window: OpenWindow, qtbot: QtBot, tmp_path: Path) -> None:
    first = open_window()
    show_model(first, qtbot, tmp_path)
    options = AutoOptions(
        "priority", ("CUDA1", "CUDA0", "RPC0"), frozenset({"RPC0"}), ("f16", "q8_0"), True, one_backend=True
    )
    first.desk.auto_layouts.set_options(options)
    first.desk.auto_layouts.toggle_pin(PinToggle((4, 5)))
    first.main.close()
    second = open_window()
    assert second.desk.auto_layouts.options == options
    assert second.desk.auto_layouts.pins == NO_PINS, "another model has none"
    show_model(second, qtbot, tmp_path)
    assert second.desk.auto_layouts.pins == Pins((Pin("CUDA0", 4, 5),))
    second.actions["auto_layout"].trigger()
    dialog = second.auto_layout_presenter.dialog
    assert dialog is not None
    assert dialog.options == options
    assert "layers 4-5 on CUDA0" in dialog.pins_label.text()


def test_options_that_cannot_be_read_are_none(open_window: OpenWindow, tmp_path: Path) -> None:
    text = '[General]\nauto_layout=nonsense\npins="{\\"layers\\": 3}"\n'
    (tmp_path / "settings.ini").write_text(text)
    window = open_window()
    assert window.desk.auto_layouts.options == AutoOptions()
    assert window.desk.auto_layouts.pins == NO_PINS


def test_the_dialog_finds_layouts_with_its_options(open_window: OpenWindow, qtbot: QtBot, tmp_path: Path) -> None:
    window = open_window()
    show_model(window, qtbot, tmp_path)
    window.actions["auto_layout"].trigger()
    dialog = window.auto_layout_presenter.dialog
    assert dialog is not None
    dialog.set_options(AutoOptions("priority", ("CUDA1", "CUDA0"), split=True))
    dialog.split_box.click()
    dialog.split_box.click()
    with qtbot.waitSignal(window.desk.auto_layouts.found):
        dialog.find_button.click()
    assert edit_of(window).layout.output_device == "CUDA1"
    assert "CUDA1" in dialog.explanation_label.text()
    assert window.desk.document.undo_group.undoText() == "auto layout priority"
    window.desk.auto_layouts.set_options(msgspec.structs.replace(dialog.options, off=frozenset({"CUDA1"})))
    assert find(window, qtbot, "fewest").layout.devices == ("CUDA0",)
    window.desk.opener.model_changed.emit(None)
    assert dialog.explanation_label.text() == ""


def test_a_search_tells_how_far_it_is_until_it_has_found(open_window: OpenWindow, qtbot: QtBot, tmp_path: Path) -> None:
    window = open_window()
    show_model(window, qtbot, tmp_path)
    told: list[str] = []
    window.desk.auto_layouts.searching.connect(told.append)
    find(window, qtbot, "fastest")
    assert told[0] == "Finding a layout"
    assert told[1] == "Finding a layout; layouts tried: 1"
    assert told[-1] == ""
    assert "Finding" not in window.main.status_line.text()


def test_a_cancelled_search_changes_nothing(open_window: OpenWindow, qtbot: QtBot, tmp_path: Path) -> None:
    window = open_window()
    show_model(window, qtbot, tmp_path)
    before, layouts = edit_of(window), window.desk.auto_layouts
    found: list[AutoLayout] = []
    layouts.found.connect(found.append)
    layouts.use("balanced")
    assert "Finding a layout" in window.main.status_line.text()
    assert window.actions["cancel_auto_layout"].isEnabled()
    window.actions["cancel_auto_layout"].trigger()
    assert not window.actions["cancel_auto_layout"].isEnabled()
    assert "Finding a layout" not in window.main.status_line.text()
    assert edit_of(window) == before
    find(window, qtbot, "fewest")
    assert len(found) == 1


def test_answers_teach_how_fast_layouts_are(open_window: OpenWindow, qtbot: QtBot, tmp_path: Path) -> None:
    speeds_path().unlink(missing_ok=True)  # what other tests of this process measured
    window = open_window()
    file = show_model(window, qtbot, tmp_path)
    desk, model = window.desk, window.desk.models.current
    model.file = file
    edit = edit_of(window)
    model.loading.loaded = LoadedLayout(edit, (), ())
    answer = Done(
        prompt_tokens=4, generated_tokens=64, prompt_tokens_per_second=100.0, generation_tokens_per_second=7.0,
        stop_reason="end_of_text",
    )  # fmt: skip
    assert window.main.editor.speed_text.startswith("roughly ")
    assert window.main.editor.speed_text.endswith(" tokens/s (not measured)")
    model.conversation.answer_finished.emit(answer)
    qtbot.waitUntil(lambda: bool(desk.speeds.book.answers))
    assert desk.speeds.book.answers[-1].layout_class == "layer cpu+gpu"
    # What was just measured, and no prediction that contradicts it.
    qtbot.waitUntil(lambda: window.main.editor.speed_text.startswith("7.0 tokens/s measured"))
    assert "predicted" not in window.main.editor.speed_text
    qtbot.waitUntil(lambda: read_speed_book(speeds_path()) == desk.speeds.book)
    kept = desk.speeds.book
    with qtbot.waitSignal(desk.speeds.compared):
        model.conversation.answer_finished.emit(msgspec.structs.replace(answer, generated_tokens=2))
    assert desk.speeds.book == kept, "a few tokens say little"
    # What a command has written to the file meanwhile stays.
    theirs = MeasuredChoice("n_ubatch", 1024, 512, 1.3, 1.2, 1.4, "here", "load")
    write_speed_book(speeds_path(), kept.with_choices([theirs]))
    desk.speeds.learn_answers(kept, replace(kept, answers=(*kept.answers, TokenTiming("class", {"CPU": 1.0}, 2.0))))
    qtbot.waitUntil(lambda: read_speed_book(speeds_path()).answers == desk.speeds.book.answers)
    assert read_speed_book(speeds_path()).choices == (theirs,)
    model.loading.loaded = None


@pytest.mark.exhaustive
def test_speeds_are_measured_from_the_menu(
    open_window: OpenWindow, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No types of weights, and a small matrix: each takes half a second of each device.
    monkeypatch.setattr("engine.machines.rigs.speeds._ENOUGH_S", 0.0)
    monkeypatch.setattr("engine.machines.rigs.speeds.MAX_BYTES", 8 * MIB)
    window = open_window()
    with qtbot.waitSignal(window.desk.notices.given) as told:
        window.actions["measure_speeds"].trigger()
    assert told.args is not None
    assert "CPU: memory bandwidth" in told.args[0].text
    assert "CPU: memory bandwidth" in window.main.status_line.text()


def test_margins_survive(open_window: OpenWindow, qtbot: QtBot) -> None:
    first = open_window()
    with qtbot.waitSignal(first.desk.rig.live.rig_changed):
        first.desk.rig.search.set_limits(DeviceLimits(CPU_ID, 8 << 30, 3 << 30))
    first.main.close()
    second = open_window().desk.rig
    with qtbot.waitSignal(second.live.rig_changed):
        second.search.refresh()
    assert (second.live.rig.host.cap_bytes, second.live.rig.host.margin_bytes) == (8 << 30, 3 << 30)


def test_what_contradicts_itself_is_told(open_window: OpenWindow, qtbot: QtBot, tmp_path: Path) -> None:
    window = open_window()
    show_model(window, qtbot, tmp_path)
    before = edit_of(window)
    layouts = window.desk.auto_layouts
    layouts.toggle_pin(PinToggle((4, 5)))
    layouts.set_options(AutoOptions(off=frozenset({"CUDA0"})))
    with qtbot.waitSignal(window.desk.notices.given) as told:
        layouts.use("fewest")
    assert told.args is not None
    assert "CUDA0 is excluded but has pinned layers" in told.args[0].text
    assert edit_of(window) == before


def test_what_was_found_for_other_settings_is_not_taken(open_window: OpenWindow, qtbot: QtBot, tmp_path: Path) -> None:
    window = open_window()
    show_model(window, qtbot, tmp_path)
    desk = window.desk
    desk.auto_layouts.use("fewest")
    desk.document.set_context(ContextSettings(n_ctx=2048))
    edited = edit_of(window)
    with qtbot.waitSignal(desk.notices.given) as told:
        pass
    assert told.args is not None
    assert "settings changed" in told.args[0].text
    assert told.args[0].bad
    assert edit_of(window) == edited


def test_what_was_found_for_another_model_is_not_taken(open_window: OpenWindow, qtbot: QtBot, tmp_path: Path) -> None:
    window = open_window()
    model = show_model(window, qtbot, tmp_path)
    desk, edit = window.desk, edit_of(window)
    desk.auto_layouts.use("fewest")
    desk.document.open(replace(model, name="another"), desk.rig.live.rig, edit)
    with qtbot.waitSignal(desk.notices.given) as told:
        pass
    assert told.args is not None
    assert f"the layout was made for {model.name}" in told.args[0].text
    assert edit_of(window) == edit


def test_what_was_found_for_other_devices_is_not_taken(open_window: OpenWindow, qtbot: QtBot, tmp_path: Path) -> None:
    window = open_window()
    show_model(window, qtbot, tmp_path)
    desk = window.desk
    # An edited layout: it does not follow the devices.
    desk.document.set_layout(make_layout(16, ["CUDA0"] * 16), "move")
    edit = edit_of(window)
    rig = make_rig(make_gpu("CUDA0", 12))
    desk.auto_layouts.use("balanced")
    desk.rig.live.set_devices(list_of_file(rig, found=Rig((), rig.host)))
    with qtbot.waitSignal(desk.notices.given) as told:
        pass
    assert told.args is not None
    assert "devices changed" in told.args[0].text
    assert edit_of(window) == edit


def test_what_was_found_is_taken_where_only_layers_were_moved(
    open_window: OpenWindow, qtbot: QtBot, tmp_path: Path
) -> None:
    window = open_window()
    show_model(window, qtbot, tmp_path)
    with qtbot.waitSignal(window.desk.auto_layouts.found) as told:
        window.desk.auto_layouts.use("fewest")
        window.desk.document.set_layout(single_device(16, CPU_ID), "gather")
    assert told.args is not None
    assert edit_of(window).layout == told.args[0].layout != single_device(16, CPU_ID)


def test_a_layout_file_is_for_the_model_that_it_was_opened_for(
    open_window: OpenWindow, qtbot: QtBot, tmp_path: Path
) -> None:
    window = open_window()
    model = show_model(window, qtbot, tmp_path)
    desk, edit = window.desk, edit_of(window)
    path = tmp_path / "layout.json"
    write_layout(path, LayoutFile(model.name, single_device(16, CPU_ID), ContextSettings(n_ctx=2048)))
    desk.layouts.open(path)
    desk.document.open(replace(model, name="another"), desk.rig.live.rig, edit)
    with qtbot.waitSignal(desk.notices.given) as told:
        pass
    assert told.args is not None
    assert f"layout.json was opened for {model.name}" in told.args[0].text
    assert told.args[0].bad
    assert edit_of(window) == edit
    desk.document.open(model, desk.rig.live.rig, edit)
    desk.layouts.open(path)
    qtbot.waitUntil(lambda: edit_of(window).layout == single_device(16, CPU_ID))
    assert edit_of(window).context.n_ctx == 2048
