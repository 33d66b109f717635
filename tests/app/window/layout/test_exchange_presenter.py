"""Layout > Export and Layout > Import: exported text that follows edits, and layouts from imported text."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QApplication, QDialogButtonBox
from pytestqt.qtbot import QtBot

from app.window import dialogs
from app.wiring import WindowObjects
from engine.devices.device import CPU_ID
from engine.devices.rig_file import encode_rig
from engine.model.gguf.reader import read_model
from engine.planning.exchange.exporting import TARGETS
from engine.planning.exchange.importing import MAX_TEXT
from engine.planning.layout.layout import make_layout, single_device
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from tests.support.models import write_header_only
from tests.support.previews import make_gpu, make_rig
from widgets.controls.exchange_dialogs import ExportLayoutDialog, ImportLayoutDialog


@pytest.fixture
def edited(window: WindowObjects, qtbot: QtBot, tmp_path: Path) -> WindowObjects:
    """A window with two cards and a model of four layers on the first."""
    path = write_header_only(tmp_path / "model.gguf", n_layers=4, n_embd=2048, n_head=16, n_ff=8192, n_vocab=4096)
    rig = make_rig(make_gpu("CUDA0", 12), make_gpu("CUDA1", 16))
    (tmp_path / "rig.json").write_bytes(encode_rig(rig))
    with qtbot.waitSignal(window.desk.rig.live.rig_changed):
        window.desk.rig.files.open(tmp_path / "rig.json")
    model = read_model(path)
    window.desk.document.open(model, rig, Edit(single_device(4, "CUDA0"), ContextSettings()))
    window.desk.opener.model_changed.emit(model)
    return window


def export_dialog(window: WindowObjects) -> ExportLayoutDialog:
    """Open the dialog, as the menu does."""
    window.actions["export_layout"].trigger()
    return next(each for each in window.main.findChildren(ExportLayoutDialog) if each.isVisible())


def import_dialog(window: WindowObjects) -> ImportLayoutDialog:
    """Open the dialog, as the menu does."""
    window.actions["import_layout"].trigger()
    return next(each for each in window.main.findChildren(ImportLayoutDialog) if each.isVisible())


def is_ready(dialog: ImportLayoutDialog) -> bool:
    """Return whether there is a layout to take."""
    return dialog.buttons.button(QDialogButtonBox.StandardButton.Ok).isEnabled()


def test_both_need_a_model(window: WindowObjects) -> None:
    window.desk.opener.model_changed.emit(None)
    assert not window.actions["export_layout"].isEnabled()
    assert not window.actions["import_layout"].isEnabled()


def test_the_text_follows_edits(edited: WindowObjects, qtbot: QtBot) -> None:
    dialog = export_dialog(edited)
    qtbot.waitUntil(lambda: "-dev CUDA0" in dialog.text)
    edited.desk.document.set_layout(make_layout(4, ["CUDA0", CPU_ID, "CUDA1", "CUDA1"]), "move")
    qtbot.waitUntil(lambda: "-ts 2,3" in dialog.text)
    assert "KV cache and attention are on CUDA0" in dialog.notes_view.toPlainText()


def test_every_program_is_offered_and_copied(edited: WindowObjects, qtbot: QtBot) -> None:
    dialog = export_dialog(edited)
    texts = {}
    for index, target in enumerate(TARGETS):
        dialog.target_box.setCurrentIndex(index)
        assert dialog.target == target
        qtbot.waitUntil(lambda: bool(dialog.text))
        dialog.copy_button.click()
        texts[target] = QGuiApplication.clipboard().text()
    assert len(set(texts.values())) == len(TARGETS)
    assert "PARAMETER num_gpu 5" in texts["ollama"]


def test_a_layout_that_breaks_a_rule_has_no_text(edited: WindowObjects, qtbot: QtBot) -> None:
    edited.desk.document.set_layout(make_layout(4, ["CUDA0", "CUDA1", "CUDA0", "CUDA1"]), "move")
    dialog = export_dialog(edited)
    qtbot.waitUntil(lambda: not dialog.copy_button.isEnabled())
    assert not dialog.text
    assert "CUDA0" in dialog.notes_view.toPlainText()


def test_the_text_is_saved(
    edited: WindowObjects, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "Modelfile"
    monkeypatch.setattr(dialogs, "ask_save", lambda *_words: path)
    dialog = export_dialog(edited)
    dialog.target_box.setCurrentIndex(TARGETS.index("ollama"))
    with qtbot.waitSignal(edited.desk.notices.given):
        dialog.save_button.click()
    assert path.read_text("utf-8") == dialog.text


def test_a_command_becomes_a_step_of_undo(edited: WindowObjects, qtbot: QtBot) -> None:
    dialog = import_dialog(edited)
    assert not is_ready(dialog)
    dialog.text_edit.setPlainText("llama-server -m other.gguf -ngl 4 -ts 1,3 -c 2048 --frobnicate")
    qtbot.waitUntil(lambda: is_ready(dialog))
    assert "--frobnicate" in dialog.notes_view.toPlainText()
    before = edited.desk.document.edit
    dialog.accept()
    edit = edited.desk.document.edit
    assert edit is not None
    assert edit.layout.assignment() == (CPU_ID, "CUDA0", "CUDA1", "CUDA1")
    assert (edit.layout.output_device, edit.context.n_ctx) == ("CUDA1", 2048)
    edited.actions["undo"].trigger()
    assert edited.desk.document.edit == before


def test_what_is_no_command_is_told_and_changes_nothing(edited: WindowObjects, qtbot: QtBot) -> None:
    dialog = import_dialog(edited)
    before = edited.desk.document.edit
    dialog.text_edit.setPlainText("all my layers")
    qtbot.waitUntil(lambda: "not a llama.cpp command" in dialog.notes_label.text())
    dialog.accept()
    assert edited.desk.document.edit == before


def test_a_configuration_with_several_models_offers_them(edited: WindowObjects, qtbot: QtBot) -> None:
    dialog = import_dialog(edited)
    dialog.text_edit.setPlainText(
        "models:\n  one:\n    cmd: llama-server -m a.gguf -ngl 5 -dev CUDA1\n"
        "  two:\n    cmd: llama-server -m b.gguf -ngl 0\n"
    )
    qtbot.waitUntil(lambda: "CUDA1 4" in dialog.notes_label.text())
    dialog.name_box.setCurrentIndex(1)
    dialog.name_box.activated.emit(1)
    qtbot.waitUntil(lambda: "CPU 4" in dialog.notes_label.text())


def test_an_opened_file_is_read(
    edited: WindowObjects, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Modelfile").write_text("FROM a.gguf\nPARAMETER num_gpu 0\n", "utf-8")
    monkeypatch.setattr(dialogs, "ask_open", lambda *_words: tmp_path / "Modelfile")
    dialog = import_dialog(edited)
    dialog.open_requested.emit()
    qtbot.waitUntil(lambda: "CPU 4" in dialog.notes_label.text())
    assert QApplication.activeModalWidget() is None


def test_a_file_with_more_bytes_than_characters_is_read_whole(
    edited: WindowObjects, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"# {'ä' * (MAX_TEXT // 2)}\nFROM a.gguf\nPARAMETER num_gpu 0\n"
    assert len(text) < MAX_TEXT < len(text.encode())
    (tmp_path / "Modelfile").write_text(text, "utf-8")
    monkeypatch.setattr(dialogs, "ask_open", lambda *_words: tmp_path / "Modelfile")
    dialog = import_dialog(edited)
    dialog.open_requested.emit()
    qtbot.waitUntil(lambda: "CPU 4" in dialog.notes_label.text())


def test_a_pasted_text_is_read_again_for_another_model(edited: WindowObjects, qtbot: QtBot, tmp_path: Path) -> None:
    dialog = import_dialog(edited)
    dialog.text_edit.setPlainText("llama-server -m other.gguf -ngl 0")
    qtbot.waitUntil(lambda: is_ready(dialog))
    assert "CPU 4" in dialog.notes_label.text()
    other = read_model(write_header_only(tmp_path / "six.gguf", n_layers=6))
    rig = make_rig(make_gpu("CUDA0", 12))
    edited.desk.document.open(other, rig, Edit(single_device(6, "CUDA0"), ContextSettings()))
    qtbot.waitUntil(lambda: "CPU 6" in dialog.notes_label.text())
    assert dialog.text == "llama-server -m other.gguf -ngl 0"


def test_a_text_that_was_read_for_a_model_that_is_gone_is_kept(
    edited: WindowObjects, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OK may come in the moment in which the model has changed and the text was not read anew."""
    dialog = import_dialog(edited)
    dialog.text_edit.setPlainText("llama-server -m other.gguf -ngl 0")
    qtbot.waitUntil(lambda: is_ready(dialog))
    other = read_model(write_header_only(tmp_path / "six.gguf", n_layers=6))
    monkeypatch.setattr(type(edited.desk.document), "model", property(lambda _document: other))
    dialog.accept()
    monkeypatch.undo()
    again = import_dialog(edited)
    assert again.text == "llama-server -m other.gguf -ngl 0"
    qtbot.waitUntil(lambda: is_ready(again))
