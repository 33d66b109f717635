"""Layout > Compare Two Layouts in the window: choices of each side, and opening a side in the editor."""

from __future__ import annotations

import json
from pathlib import Path
from zlib import crc32

import pytest
from pytestqt.qtbot import QtBot

from app.window import dialogs
from app.wiring import WindowObjects
from engine.base.values import replace
from engine.devices.rig_file import encode_rig
from engine.library.notes import SavedDocument
from engine.planning.layout.layout_file import LayoutFile, encode_layout
from engine.planning.memory.drafts import Draft
from engine.planning.plan.edit import Edit
from engine.planning.plan.preview import LoadedLayout
from engine.planning.speed.prediction import LastAnswer
from tests.support.models import write_tiny_llama
from tests.support.previews import make_gpu, make_layout, make_rig
from tests.support.windows import WindowOpener
from widgets.controls.named_layouts_dialog import NamedLayoutsDialog
from widgets.layout_editor.comparison_dialog import ComparisonDialog
from widgets.layout_editor.placement import PinToggle


@pytest.fixture
def window(open_window: WindowOpener, tmp_path: Path, qtbot: QtBot, request: pytest.FixtureRequest) -> WindowObjects:
    """A window with two cards that are not here, and a model."""
    opened = open_window()
    (tmp_path / "rig.json").write_bytes(encode_rig(make_rig(make_gpu("CUDA0", 24), make_gpu("CUDA1", 12))))
    with qtbot.waitSignal(opened.desk.rig.live.rig_changed):
        opened.desk.rig.files.open(tmp_path / "rig.json")
    # Windows of one run share the library's index, in which equal files are one model.
    model = write_tiny_llama(tmp_path / "m.gguf", n_layers=4, seed=crc32(request.node.name.encode()))
    with qtbot.waitSignal(opened.desk.opener.model_changed):
        opened.desk.opener.open(model)
    qtbot.waitUntil(lambda: opened.desk.document.plan is not None)
    opened.desk.document.set_layout(make_layout(4, [("CUDA0", 4)]), "begin")
    return opened


def opened_dialog(window: WindowObjects, qtbot: QtBot) -> ComparisonDialog:
    window.actions["compare_layouts"].trigger()
    (dialog,) = window.main.findChildren(ComparisonDialog)
    assert isinstance(dialog, ComparisonDialog)
    qtbot.waitUntil(lambda: dialog.take_buttons[0].isEnabled() and dialog.take_buttons[1].isEnabled())
    return dialog


def choose(dialog: ComparisonDialog, side: int, title: str) -> None:
    box = dialog.boxes[side]
    row = box.findText(title)
    assert row >= 0, [box.itemText(each) for each in range(box.count())]
    box.setCurrentIndex(row)
    box.activated.emit(row)


def titles(dialog: ComparisonDialog) -> list[str]:
    return [dialog.boxes[0].itemText(row) for row in range(dialog.boxes[0].count())]


def differences(dialog: ComparisonDialog) -> list[list[str]]:
    table = dialog.differences
    return [
        [item.text() for column in range(3) if (item := table.item(row, column)) is not None]
        for row in range(table.rowCount())
    ]


def devices_of(dialog: ComparisonDialog, side: int) -> set[str]:
    """Return the devices that have layers in the layout of a side."""
    contents = {lane.id: lane.contents[side] for lane in dialog.lanes.lanes}
    return {device for device, content in contents.items() if content is not None and content.ranges}


def edit_of(window: WindowObjects) -> Edit:
    edit = window.desk.document.edit
    assert edit is not None
    return edit


def layout_text(window: WindowObjects, runs: list[tuple[str, int]]) -> str:
    return encode_layout(LayoutFile("m", make_layout(4, runs), edit_of(window).context)).decode()


def test_every_source_is_offered(window: WindowObjects, qtbot: QtBot) -> None:
    found = titles(opened_dialog(window, qtbot))
    assert found[0] == "current layout"
    assert [each for each in found if each.startswith("Auto Layout")] == [
        "Auto Layout: Fewest Devices",
        "Auto Layout: One Device after Another",
        "Auto Layout: Balanced",
        "Auto Layout: Proportional",
        "Auto Layout: Experts Last",
        "Auto Layout: Longest Context",
        "Auto Layout: Fastest",
    ]
    assert found[-2:] == ["Layout file…", "Devices of a rig file…"]


def test_a_layout_file_is_compared_and_taken_as_one_step(
    window: WindowObjects, tmp_path: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "two.json").write_text(layout_text(window, [("CUDA0", 1), ("CUDA1", 3)]))
    monkeypatch.setattr(dialogs, "ask_open", lambda *_: tmp_path / "two.json")
    dialog, before = opened_dialog(window, qtbot), edit_of(window)
    choose(dialog, 1, "Layout file…")
    wanted = [["Layers 1-3", "CUDA0", "CUDA1"], ["Output layer", "CUDA0", "CUDA1"]]
    qtbot.waitUntil(lambda: differences(dialog)[:2] == wanted)
    assert dialog.boxes[1].currentText() == "two"
    dialog.take_buttons[1].click()
    assert edit_of(window).layout == make_layout(4, [("CUDA0", 1), ("CUDA1", 3)])
    qtbot.waitUntil(lambda: differences(dialog) == [["The layouts are equal.", "", ""]])
    window.desk.document.undo_group.undo()
    assert edit_of(window) == before
    qtbot.waitUntil(lambda: differences(dialog)[:2] == wanted)


def test_the_current_side_follows_the_editor(window: WindowObjects, qtbot: QtBot) -> None:
    dialog = opened_dialog(window, qtbot)
    choose(dialog, 1, "current layout")
    qtbot.waitUntil(lambda: differences(dialog) == [["The layouts are equal.", "", ""]])
    window.desk.document.set_layout(make_layout(4, [("CUDA1", 4)]), "move")
    qtbot.waitUntil(
        lambda: {lane.id for lane in dialog.lanes.lanes if lane.contents[0] and lane.contents[0].ranges} == {"CUDA1"}
    )


def test_the_last_load_is_kept_after_an_unload(window: WindowObjects, qtbot: QtBot) -> None:
    loading, edit = window.desk.loading, edit_of(window)
    loading.last_loaded = LoadedLayout(edit, (), ())
    window.desk.document.set_layout(make_layout(4, [("CUDA1", 4)]), "move")
    dialog = opened_dialog(window, qtbot)
    assert dialog.boxes[1].currentText() == "last load"
    qtbot.waitUntil(lambda: ["Layers 0-3", "CUDA1", "CUDA0"] in differences(dialog))


def test_named_layouts_are_offered_and_leave_when_they_are_deleted(window: WindowObjects, qtbot: QtBot) -> None:
    model = window.desk.document.model
    assert model is not None
    catalogue, path = window.desk.library.catalogue, model.paths[0]
    catalogue.save_document(path, SavedDocument("layout", "mine", layout_text(window, [("CUDA1", 4)])))
    dialog = opened_dialog(window, qtbot)
    qtbot.waitUntil(lambda: "mine" in titles(dialog))
    choose(dialog, 1, "mine")
    qtbot.waitUntil(lambda: ["Layers 0-3", "CUDA0", "CUDA1"] in differences(dialog))
    catalogue.forget_document_of(path, SavedDocument("layout", "mine", ""))
    dialog.close()
    window.actions["compare_layouts"].trigger()
    qtbot.waitUntil(lambda: "mine" not in titles(dialog))
    assert dialog.boxes[1].currentText() == "current layout"


def test_another_rig_has_a_layout_of_its_own_and_is_shown_when_it_is_taken(
    window: WindowObjects, tmp_path: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "big.json").write_bytes(encode_rig(make_rig(make_gpu("CUDA5", 80, name="H100"))))
    monkeypatch.setattr(dialogs, "ask_open", lambda *_: tmp_path / "big.json")
    dialog = opened_dialog(window, qtbot)
    choose(dialog, 1, "Devices of a rig file…")
    qtbot.waitUntil(lambda: dialog.state_labels[1].text() == "Forecast for the devices of the rig file.")
    assert {lane.id for lane in dialog.lanes.lanes} == {"CUDA0", "CUDA1", "CPU", "CUDA5"}
    dialog.take_buttons[1].click()
    assert window.desk.rig.live.rig.ids == ("CUDA5", "CPU")
    assert "CUDA5" in edit_of(window).layout.devices
    window.desk.document.undo_group.undo()
    assert edit_of(window).layout.devices == ("CUDA0",)


def test_what_cannot_be_read_is_one_sentence_and_the_other_side_stays(
    window: WindowObjects, tmp_path: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {"version": 1, "runs": [{"device": "CPU", "layers": "0-8"}], "model": {"layers": 9}}
    (tmp_path / "nine.json").write_text(json.dumps(document))
    monkeypatch.setattr(dialogs, "ask_open", lambda *_: tmp_path / "nine.json")
    dialog, before = opened_dialog(window, qtbot), edit_of(window)
    choose(dialog, 1, "Layout file…")
    qtbot.waitUntil(
        lambda: "the layout is for a model of 9 layers, but this model has 4" in dialog.state_labels[1].text()
    )
    assert dialog.take_buttons[0].isEnabled()
    assert not dialog.take_buttons[1].isEnabled()
    assert edit_of(window) == before
    monkeypatch.setattr(dialogs, "ask_open", lambda *_: None)
    choose(dialog, 1, "Devices of a rig file…")
    assert dialog.boxes[1].currentText() == "nine", "a cancelled choice changes nothing"


def test_a_side_that_is_taken_keeps_the_side_files_of_the_editor(window: WindowObjects, qtbot: QtBot) -> None:
    document, dialog = window.desk.document, opened_dialog(window, qtbot)
    document.set_layout(make_layout(4, [("CUDA1", 4)]), "move")
    choose(dialog, 1, "Auto Layout: Fewest Devices")
    qtbot.waitUntil(lambda: devices_of(dialog, 1) == {"CUDA0"})
    drafted = replace(edit_of(window).side_files, draft=Draft("ngram", 4))
    document.set_side_files(drafted, "choose a draft")
    # The layout is taken that was found before the draft was chosen.
    dialog.take_buttons[1].click()
    assert edit_of(window).layout.devices == ("CUDA0",)
    assert edit_of(window).side_files == drafted


def test_an_automatic_side_follows_pins(window: WindowObjects, qtbot: QtBot) -> None:
    window.desk.document.set_layout(make_layout(4, [("CUDA1", 4)]), "move")
    dialog = opened_dialog(window, qtbot)
    choose(dialog, 1, "Auto Layout: Fewest Devices")
    qtbot.waitUntil(lambda: devices_of(dialog, 1) == {"CUDA0"})
    window.desk.auto_layouts.toggle_pin(PinToggle((0, 3)))
    qtbot.waitUntil(lambda: devices_of(dialog, 1) == {"CUDA1"})


def test_a_measured_speed_is_shown(window: WindowObjects, qtbot: QtBot) -> None:
    desk = window.desk
    model = desk.document.model
    assert model is not None
    desk.speeds._answered[model.paths[0], edit_of(window)] = LastAnswer(17.0, 100)
    dialog = opened_dialog(window, qtbot)
    table = dialog.figures

    def measured() -> str:
        for row in range(table.rowCount()):
            name, value = table.item(row, 0), table.item(row, 1)
            if name is not None and value is not None and name.text() == "Answer speed, measured":
                return value.text()
        return ""

    qtbot.waitUntil(lambda: measured() == "17 tokens/s")


def test_without_a_model_nothing_can_be_chosen(open_window: WindowOpener) -> None:
    window = open_window()
    window.actions["compare_layouts"].trigger()
    (dialog,) = window.main.findChildren(ComparisonDialog)
    assert dialog.state_labels[0].text() == "No model is open."
    assert not any(box.isEnabled() for box in dialog.boxes)
    assert not any(button.isEnabled() for button in dialog.take_buttons)


def test_another_model_begins_a_new_comparison(window: WindowObjects, tmp_path: Path, qtbot: QtBot) -> None:
    dialog = opened_dialog(window, qtbot)
    with qtbot.waitSignal(window.desk.opener.model_changed):
        window.desk.opener.open(write_tiny_llama(tmp_path / "other.gguf", n_layers=3))
    qtbot.waitUntil(lambda: bool(differences(dialog)))
    shown = [lane.contents[0].ranges for lane in dialog.lanes.lanes if lane.contents[0] and lane.contents[0].ranges]
    assert max(last for ranges in shown for _, last in ranges) == 2


def test_an_open_comparison_follows_a_named_layout_that_is_replaced_or_deleted(
    window: WindowObjects, qtbot: QtBot
) -> None:
    desk = window.desk
    model = desk.document.model
    assert model is not None
    catalogue, path = desk.library.catalogue, model.paths[0]
    catalogue.save_document(path, SavedDocument("layout", "mine", layout_text(window, [("CUDA1", 4)])))
    dialog = opened_dialog(window, qtbot)
    qtbot.waitUntil(lambda: "mine" in titles(dialog))
    choose(dialog, 1, "mine")
    qtbot.waitUntil(lambda: devices_of(dialog, 1) == {"CUDA1"})
    catalogue.save_document(path, SavedDocument("layout", "mine", layout_text(window, [("CUDA0", 2), ("CUDA1", 2)])))
    window.actions["named_layouts"].trigger()
    qtbot.waitUntil(lambda: devices_of(dialog, 1) == {"CUDA0", "CUDA1"})
    (named,) = window.main.findChildren(NamedLayoutsDialog)
    qtbot.waitUntil(lambda: named.table.rowCount() == 1)
    named.table.selectRow(0)
    named.delete_button.click()
    qtbot.waitUntil(lambda: dialog.boxes[1].currentText() == "current layout")
    qtbot.waitUntil(lambda: devices_of(dialog, 1) == {"CUDA0"})
