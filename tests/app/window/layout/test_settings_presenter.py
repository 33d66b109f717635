"""All settings in the window: decided values are shown, changes can be undone, side files are stored for each model."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtWidgets import QComboBox
from pytestqt.qtbot import QtBot

from app.settings import Settings, StoredSideFiles
from app.window import dialogs
from app.window.layout.settings_presenter import loaded_text
from app.wiring import WindowObjects
from engine.devices.rig_file import encode_rig
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, Run
from engine.planning.memory.side_files import SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.plan.preview import LoadedLayout
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings
from tests.support.models import write_header_only, write_tiny_llama
from tests.support.previews import make_gpu, make_rig
from tests.support.side_models import write_tiny_lora, write_tiny_projector
from tests.support.windows import WindowOpener, open_with_model
from widgets.controls.settings_dialog import AdapterScale, SettingsDialog
from widgets.controls.values import AdapterName


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model, an adapter and a projector."""
    model = read_model(write_tiny_llama(tmp_path / "m.gguf", n_layers=4))
    write_tiny_lora(tmp_path / "lora.gguf", model)
    write_tiny_projector(tmp_path / "mmproj.gguf")
    rig = make_rig(make_gpu("CUDA0", 12), make_gpu("CUDA1", 16))
    (tmp_path / "rig.json").write_bytes(encode_rig(rig))
    return tmp_path


@pytest.fixture
def window(open_window: WindowOpener, qtbot: QtBot, folder: Path) -> WindowObjects:
    return open_with_model(open_window, qtbot, folder)


def dialog_of(window: WindowObjects) -> SettingsDialog:
    window.main.settings_bar.context_editor.all_button.click()
    dialog = window.settings_presenter.dialog
    assert dialog is not None
    assert dialog.isVisible()
    return dialog


def side_files(window: WindowObjects) -> SideFiles:
    edit = window.desk.document.edit
    assert edit is not None
    return edit.side_files


def names(window: WindowObjects) -> list[str]:
    files = side_files(window)
    projector = [] if files.projector is None else [files.projector.path.name]
    return projector + [each.path.name for each in files.adapters]


def test_what_was_decided_is_in_the_dialog_and_the_tool_tips(window: WindowObjects) -> None:
    dialog = dialog_of(window)
    assert dialog.rows.line("load_mode").startswith("mmap: ")
    assert "trained context length, 4096 tokens" in dialog.rows.line("n_ctx")
    # Cards have no kernel for heads of 16.
    tool_tip = window.main.settings_bar.context_editor.flash_box.toolTip()
    assert "off: Not all devices that hold layers (CUDA1) support flash attention" in tool_tip
    box = dialog.controls["load_mode"].widgets[0]
    assert isinstance(box, QComboBox)
    box.setCurrentText("none")
    box.activated.emit(0)
    preview = window.desk.document.preview
    assert preview is not None
    assert preview.report.context is not None
    assert preview.report.context.load_mode == "none"
    assert dialog.rows.line("load_mode").startswith("Set explicitly")
    window.actions["undo"].trigger()
    assert box.currentText() == "auto"


def test_what_is_loaded_tells_what_it_was_loaded_with() -> None:
    used = ContextSettings(n_ctx=16384, type_v="q8_0", load_mode="mmap", threads=6, threads_batch=8)
    edit = Edit(Layout(4, (Run("CPU", 0, 3),), "CPU"), ContextSettings())
    assert loaded_text(None) == ""
    assert loaded_text(LoadedLayout(edit, (), ())) == ""
    assert loaded_text(LoadedLayout(edit, (), (), used=used, flash_attention=True)) == (
        "Settings of the loaded model: 16\u202f384 tokens of context, K cache f16 and V cache q8_0, "
        "flash attention on, load mode mmap, 6 CPU threads, 8 for prompts, op_offload on."
    )


def test_the_menu_opens_the_dialog(window: WindowObjects, qtbot: QtBot) -> None:
    window.actions["load_settings"].trigger()
    (dialog,) = window.main.findChildren(SettingsDialog)
    assert dialog.isVisible()
    assert dialog.isEnabled()


def test_a_context_left_open_is_shown_as_what_it_is_now(window: WindowObjects, qtbot: QtBot) -> None:
    editor = window.main.settings_bar.context_editor
    editor.presets_button.menu().actions()[0].trigger()
    edit = window.desk.document.edit
    assert edit is not None
    assert edit.context.n_ctx == AUTO_CONTEXT
    assert editor.n_ctx_box.value() == 4096
    assert editor.context_label.text() == "Context · auto"
    editor.n_ctx_box.setValue(2048)
    assert editor.context_label.text() == "Context"


def test_files_are_chosen_counted_undone_and_kept(
    window: WindowObjects, open_window: WindowOpener, qtbot: QtBot, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialog, document = dialog_of(window), window.desk.document
    assert document.preview is not None
    before = [row.need_bytes for row in document.preview.report.rows]
    for button, name in ((dialog.side_files.choose_button, "mmproj.gguf"), (dialog.side_files.add_button, "lora.gguf")):
        chosen = folder / name
        monkeypatch.setattr(dialogs, "ask_open", lambda *_, chosen=chosen: chosen)
        with qtbot.waitSignal(document.edit_settled):
            button.click()
    assert names(window) == ["mmproj.gguf", "lora.gguf"]
    dialog.side_files.adapter_scaled.emit(AdapterScale(0, 0.5))
    dialog.side_files.projector_device_chosen.emit("CUDA1")
    assert document.preview is not None
    after = [row.need_bytes for row in document.preview.report.rows]
    assert [more > less for more, less in zip(after, before, strict=True)][1]
    assert dialog.side_files.projector_line.text().startswith("Set explicitly")
    assert window.desk.settings.side_files(folder / "m.gguf") == StoredSideFiles(
        str(folder / "mmproj.gguf"), "CUDA1", (AdapterName(str(folder / "lora.gguf"), 0.5),)
    )
    window.main.close()
    again = open_with_model(open_window, qtbot, folder)
    files = side_files(again)
    assert names(again) == ["mmproj.gguf", "lora.gguf"]
    assert (files.adapters[0].scale, files.projector and files.projector.device) == (0.5, "CUDA1")
    dialog_of(again).side_files.projector_removed.emit()
    again.desk.side_files.remove_adapter(0)
    assert names(again) == []
    assert again.desk.settings.side_files(folder / "m.gguf") == StoredSideFiles()
    again.actions["undo"].trigger()
    assert names(again) == ["lora.gguf"]


def test_a_file_that_does_not_belong_to_the_model_is_refused_in_a_sentence(
    window: WindowObjects, qtbot: QtBot, folder: Path
) -> None:
    with qtbot.waitSignal(window.desk.notices.given) as told:
        window.desk.side_files.add_adapter(folder / "mmproj.gguf")
    assert told.args[0].text.startswith("mmproj.gguf: is a projector, not a LoRA adapter")
    assert names(window) == []


def test_a_kept_file_that_is_away_is_told_of_and_not_forgotten(
    open_window: WindowOpener, qtbot: QtBot, folder: Path
) -> None:
    stored = StoredSideFiles(str(folder / "away.gguf"), None, (AdapterName(str(folder / "lora.gguf"), 1.0),))
    settings = Settings(folder / "settings.ini")
    settings.store_side_files(folder / "m.gguf", stored)
    settings.sync()
    window = open_with_model(open_window, qtbot, folder)
    assert names(window) == ["lora.gguf"]
    assert "away.gguf: there is no such file" in window.main.status_line.text()
    assert window.desk.settings.side_files(folder / "m.gguf") == stored


def test_a_file_that_is_away_when_the_model_is_opened_again_is_not_forgotten(
    window: WindowObjects, qtbot: QtBot, folder: Path
) -> None:
    with qtbot.waitSignal(window.desk.document.edit_settled):
        window.desk.side_files.choose_projector(folder / "mmproj.gguf")
    stored = window.desk.settings.side_files(folder / "m.gguf")
    assert stored.projector == str(folder / "mmproj.gguf")
    write_tiny_llama(folder / "other.gguf", n_layers=4)
    (folder / "mmproj.gguf").rename(folder / "away.gguf")
    for name in ("other.gguf", "m.gguf"):
        with qtbot.waitSignal(window.desk.opener.model_changed):
            window.desk.opener.open(folder / name)
    assert names(window) == []
    assert window.desk.settings.side_files(folder / "m.gguf") == stored


def test_an_automatic_layout_keeps_the_files_and_leaves_room_for_them(
    window: WindowObjects, qtbot: QtBot, folder: Path
) -> None:
    with qtbot.waitSignal(window.desk.document.edit_settled):
        window.desk.side_files.choose_projector(folder / "mmproj.gguf")
    with qtbot.waitSignal(window.desk.notices.given):
        window.desk.auto_layouts.use("fewest")
    preview = window.desk.document.preview
    assert preview is not None
    assert names(window) == ["mmproj.gguf"]
    assert preview.report.fits
    assert "projector" in {each.setting for each in preview.report.decisions}


def test_another_model_has_files_of_its_own(window: WindowObjects, qtbot: QtBot, folder: Path) -> None:
    with qtbot.waitSignal(window.desk.document.edit_settled):
        window.desk.side_files.choose_projector(folder / "mmproj.gguf")
    other = write_header_only(folder / "other.gguf", n_layers=4, n_embd=1024, n_head=8, n_ff=2048, n_vocab=4096)
    with qtbot.waitSignal(window.desk.opener.model_changed):
        window.desk.opener.open(other)
    assert names(window) == []
    with qtbot.waitSignal(window.desk.opener.model_changed):
        window.desk.opener.open(folder / "m.gguf")
    assert names(window) == ["mmproj.gguf"]
