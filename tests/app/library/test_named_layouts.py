"""Layout > Named Layouts: saving, renaming, duplicating, deleting, importing and exporting layouts of a model."""

from __future__ import annotations

import json
from pathlib import Path
from zlib import crc32

import msgspec
import pytest
from pytestqt.qtbot import QtBot

from app.window import dialogs
from app.window.layout.named_layouts_presenter import file_name_of
from app.wiring import WindowObjects
from engine.devices.rig_file import encode_rig
from engine.library.notes import SavedDocument
from engine.planning.layout.layout_file import read_layout
from tests.support.models import write_tiny_llama
from tests.support.previews import make_gpu, make_rig
from tests.support.windows import WindowOpener
from widgets.controls.named_layouts_dialog import NamedLayoutsDialog


@pytest.fixture
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    # Windows of one run share the library's index, in which equal files are one model.
    return write_tiny_llama(tmp_path / "model.gguf", n_layers=4, seed=crc32(request.node.name.encode()))


@pytest.fixture
def window(open_window: WindowOpener, model: Path, qtbot: QtBot) -> WindowObjects:
    opened = open_window()
    with qtbot.waitSignal(opened.desk.opener.model_changed):
        opened.desk.opener.open(model)
    return opened


def use_rig(window: WindowObjects, folder: Path, qtbot: QtBot, *gib: float) -> None:
    path = folder / "rig.json"
    path.write_bytes(encode_rig(make_rig(*(make_gpu(f"CUDA{number}", size) for number, size in enumerate(gib)))))
    with qtbot.waitSignal(window.desk.rig.live.rig_changed):
        window.desk.rig.files.open(path)


def opened_dialog(window: WindowObjects, qtbot: QtBot) -> NamedLayoutsDialog:
    window.actions["named_layouts"].trigger()
    (dialog,) = window.main.findChildren(NamedLayoutsDialog)
    assert isinstance(dialog, NamedLayoutsDialog)
    qtbot.waitUntil(dialog.import_button.isEnabled)
    return dialog


def rows(dialog: NamedLayoutsDialog) -> list[list[str]]:
    table = dialog.table
    return [
        [item.text() for column in range(3) if (item := table.item(row, column)) is not None]
        for row in range(table.rowCount())
    ]


def names(dialog: NamedLayoutsDialog) -> list[str]:
    return [row[0] for row in rows(dialog)]


def save(dialog: NamedLayoutsDialog, name: str, qtbot: QtBot) -> None:
    dialog.name_edit.setText(name)
    dialog.save_button.click()
    qtbot.waitUntil(lambda: name in names(dialog))


def test_a_layout_is_saved_with_its_devices_and_used_again(window: WindowObjects, tmp_path: Path, qtbot: QtBot) -> None:
    use_rig(window, tmp_path, qtbot, 24, 12)
    document = window.desk.document
    window.actions["split_evenly"].trigger()
    wanted = document.edit
    dialog = opened_dialog(window, qtbot)
    dialog.name_edit.setText("  both   cards ")
    dialog.save_button.click()
    qtbot.waitUntil(lambda: names(dialog) == ["both cards"])
    assert rows(dialog) == [["both cards", "CUDA0 2, CUDA1 2", "RTX 3090, RTX 3090"]]
    document.undo_group.undo()
    assert document.edit != wanted
    dialog.table.selectRow(0)
    dialog.use_button.click()
    assert document.edit == wanted
    document.undo_group.undo()
    assert document.edit != wanted


def test_duplicate_rename_delete_and_restore(window: WindowObjects, qtbot: QtBot) -> None:
    dialog = opened_dialog(window, qtbot)
    save(dialog, "one", qtbot)
    dialog.table.selectRow(0)
    assert dialog.name == "one"
    assert not dialog.rename_button.isEnabled()
    dialog.duplicate_button.click()
    qtbot.waitUntil(lambda: names(dialog) == ["one", "one 2"])
    dialog.table.selectRow(1)
    dialog.name_edit.setText("two")
    dialog.rename_button.click()
    qtbot.waitUntil(lambda: names(dialog) == ["one", "two"])
    dialog.table.selectRow(1)
    dialog.name_edit.setText("one")
    dialog.rename_button.click()
    qtbot.waitUntil(lambda: names(dialog) == ["one", "one 2"])
    dialog.table.selectRow(0)
    assert not dialog.restore_button.isEnabled()
    dialog.delete_button.click()
    qtbot.waitUntil(lambda: names(dialog) == ["one 2"])
    dialog.restore_button.click()
    qtbot.waitUntil(lambda: names(dialog) == ["one", "one 2"])
    assert not dialog.restore_button.isEnabled()


def test_export_and_import_keep_the_rig(
    window: WindowObjects, tmp_path: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_rig(window, tmp_path, qtbot, 24)
    dialog = opened_dialog(window, qtbot)
    save(dialog, "a/b", qtbot)
    proposals: list[str] = []
    file = tmp_path / "mine.json"

    def ask_save(*asked: str) -> Path:
        proposals.append(asked[3])
        return file

    monkeypatch.setattr(dialogs, "ask_save", ask_save)
    monkeypatch.setattr(dialogs, "ask_open", lambda *_asked: file)
    dialog.table.selectRow(0)
    dialog.export_button.click()
    qtbot.waitUntil(file.exists)
    assert proposals == ["a_b.json"]
    rig = read_layout(file).rig
    assert rig is not None
    assert rig.ids == ("CUDA0", "CPU")
    assert "192.0.2" not in file.read_text(encoding="utf-8")
    dialog.import_button.click()
    qtbot.waitUntil(lambda: names(dialog) == ["a/b", "mine"])
    assert rows(dialog)[0][1:] == rows(dialog)[1][1:]


def test_other_devices_are_told_when_a_layout_is_used(window: WindowObjects, tmp_path: Path, qtbot: QtBot) -> None:
    use_rig(window, tmp_path, qtbot, 24, 12)
    window.actions["split_evenly"].trigger()
    dialog = opened_dialog(window, qtbot)
    save(dialog, "two cards", qtbot)
    use_rig(window, tmp_path, qtbot, 16)
    said: list[str] = []
    window.desk.notices.given.connect(lambda notice: said.append(notice.text))
    dialog.table.selectRow(0)
    dialog.use_button.click()
    assert said == [
        "two cards was made for other devices: CUDA0 (RTX 3090, 24.00 GiB) is now RTX 3090, 16.00 GiB; "
        "CUDA1 (RTX 3090, 12.00 GiB) is missing."
    ]
    assert window.desk.document.edit is not None
    assert window.desk.document.edit.layout.devices == ("CUDA0", "CUDA1")


def test_a_file_of_another_model_is_refused_and_a_damaged_layout_is_shown(
    window: WindowObjects, model: Path, tmp_path: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialog = opened_dialog(window, qtbot)
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"version": 1, "runs": [{"device": "CPU", "layers": "0-8"}]}))
    monkeypatch.setattr(dialogs, "ask_open", lambda *_asked: file)
    said: list[str] = []
    window.desk.notices.given.connect(lambda notice: said.append(notice.text))
    dialog.import_button.click()
    qtbot.waitUntil(lambda: bool(said))
    assert "other.json" in said[0]
    assert names(dialog) == []
    window.desk.library.catalogue.save_document(model, SavedDocument("layout", "broken", "{"))
    dialog.close()
    window.actions["named_layouts"].trigger()
    qtbot.waitUntil(lambda: rows(dialog) == [["broken", "cannot be used with this model", ""]])


def test_the_list_follows_the_model(window: WindowObjects, tmp_path: Path, qtbot: QtBot) -> None:
    dialog = opened_dialog(window, qtbot)
    save(dialog, "one", qtbot)
    with qtbot.waitSignal(window.desk.opener.model_changed):
        window.desk.opener.open(write_tiny_llama(tmp_path / "other.gguf", n_layers=3))
    qtbot.waitUntil(lambda: names(dialog) == [])
    assert dialog.save_button.isEnabled() == bool(dialog.name)


def test_without_a_model_nothing_can_be_saved(open_window: WindowOpener) -> None:
    window = open_window()
    window.actions["named_layouts"].trigger()
    (dialog,) = window.main.findChildren(NamedLayoutsDialog)
    assert dialog.words.text() == "No model is open."
    dialog.name_edit.setText("one")
    assert not dialog.save_button.isEnabled()
    assert not dialog.import_button.isEnabled()


def test_the_rig_of_a_layout_file_is_checked() -> None:
    from engine.base.errors import LayoutError
    from engine.planning.layout.layout_file import LayoutFile, encode_layout, parse_layout

    file = parse_layout(json.dumps({"version": 1, "runs": [{"device": "CPU", "layers": "0-3"}]}))
    assert file.rig is None
    whole = LayoutFile("m", file.layout, file.context, rig=make_rig(make_gpu("CUDA0", 24)))
    text = encode_layout(whole)
    again = parse_layout(text)
    assert again.rig is not None
    assert again.rig.ids == ("CUDA0", "CPU")
    damaged = msgspec.json.decode(text)
    damaged["rig"]["devices"][0]["total_bytes"] = "many"
    with pytest.raises(LayoutError, match=r"rig\.devices\[0\]\.total_bytes"):
        parse_layout(msgspec.json.encode(damaged))


@pytest.mark.parametrize(
    ("name", "file_name"),
    [
        ("two cards", "two cards"),
        ("a/b:c", "a_b_c"),
        ("..", "_"),
        (".hidden.", "hidden"),
        ("con", "_con"),
        ("LPT1.old", "_LPT1.old"),
        ("/" * 3, "___"),
        ("\u00e4" * 200, "\u00e4" * 50),
    ],
)
def test_an_exported_layout_gets_a_name_that_every_file_system_takes(name: str, file_name: str) -> None:
    assert file_name_of(name) == file_name
