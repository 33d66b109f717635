"""The command palette of the window: enabled commands, models, and saved layouts of the current model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from app.settings import Settings
from app.wiring import WindowObjects
from engine.library.notes import SavedDocument
from engine.planning.layout.layout_file import LayoutFile, encode_layout
from tests.support.models import write_tiny_llama
from tests.support.windows import WindowOpener
from widgets.common.command_palette import CommandPalette
from widgets.controls.settings_dialog import SettingsDialog
from widgets.library.recent_models import RecentModel


@pytest.fixture
def window(open_window: WindowOpener, tmp_path: Path) -> WindowObjects:
    settings = Settings(tmp_path / "settings.ini")
    settings.add_recent_model(RecentModel(write_tiny_llama(tmp_path / "a&b.gguf", n_layers=2), "a & b", "F16"))
    settings.sync()
    opened = open_window()
    opened.model_presenter.show_recent_models()
    return opened


def palette_of(window: WindowObjects) -> CommandPalette:
    window.actions["command_palette"].trigger()
    found = window.main.findChild(CommandPalette)
    assert isinstance(found, CommandPalette)
    return found


def test_it_has_the_commands_that_are_possible_and_their_switches(window: WindowObjects) -> None:
    window.actions["step_back"].setChecked(True)
    titles = palette_of(window).titles
    assert {"Open Model", "Light", "Retry with Another Layout When Memory Runs Out (on)"} <= set(titles)
    assert not {"Open This Model Again", "Save Layout"} & set(titles)
    assert titles.count("a & b") == 1


def test_a_command_and_a_model_are_found_by_typing(window: WindowObjects, qtbot: QtBot) -> None:
    palette = palette_of(window)
    QTest.keyClicks(palette.search_edit, "view light")
    assert palette.titles == ("Light",)
    with qtbot.waitSignal(palette.destroyed):
        QTest.keyClick(palette.search_edit, Qt.Key.Key_Return)
    assert window.theme.palette.name == "light"
    palette = palette_of(window)
    QTest.keyClicks(palette.search_edit, "a & b")
    with qtbot.waitSignal(window.desk.opener.model_changed):
        QTest.keyClick(palette.search_edit, Qt.Key.Key_Return)


@pytest.mark.parametrize(("typed", "focused"), [("flash att", "flash_attn"), ("draft", "draft")])
def test_a_load_setting_is_found_and_its_control_has_the_focus(
    window: WindowObjects, qtbot: QtBot, tmp_path: Path, typed: str, focused: str
) -> None:
    assert "Draft" not in palette_of(window).titles, "no model is open"
    window.actions["command_palette"].trigger()
    with qtbot.waitSignal(window.desk.opener.model_changed):
        window.desk.opener.open(tmp_path / "a&b.gguf")
    window.main.show()
    palette = palette_of(window)
    QTest.keyClicks(palette.search_edit, typed)
    with qtbot.waitSignal(palette.destroyed):
        QTest.keyClick(palette.search_edit, Qt.Key.Key_Return)
    dialog = window.main.findChild(SettingsDialog)
    assert dialog is not None
    fields = dialog.side_files.field(focused) if focused == "draft" else dialog.controls[focused].widgets[0]
    assert dialog.focusWidget() is fields
    qtbot.waitUntil(lambda: not fields.visibleRegion().isEmpty())


def test_a_saved_layout_of_the_model_is_used(window: WindowObjects, qtbot: QtBot, tmp_path: Path) -> None:
    path, desk = tmp_path / "a&b.gguf", window.desk
    with qtbot.waitSignal(desk.opener.model_changed):
        desk.opener.open(path)
    model, edit = desk.document.model, desk.document.edit
    assert model is not None
    assert edit is not None
    text = encode_layout(LayoutFile(model.name, edit.layout, msgspec.structs.replace(edit.context, n_ctx=512))).decode()
    with qtbot.waitSignal(desk.library.documents_found):
        desk.library.save_document(path, SavedDocument("layout", "Evening", text), ())
    palette = palette_of(window)
    qtbot.waitUntil(lambda: "Evening" in palette.titles)
    QTest.keyClicks(palette.search_edit, "evening")
    with qtbot.waitSignal(palette.destroyed):
        QTest.keyClick(palette.search_edit, Qt.Key.Key_Return)
    assert desk.document.undo_group.undoText() == "open Evening"


def test_the_shortcut_pressed_twice_closes_it_and_the_focus_goes_back(window: WindowObjects, qtbot: QtBot) -> None:
    window.main.show()
    first = palette_of(window)
    with qtbot.waitSignal(first.destroyed):
        window.actions["command_palette"].trigger()
    assert window.main.findChild(CommandPalette) is None
    palette = palette_of(window)
    with qtbot.waitSignal(palette.destroyed):
        QTest.keyClick(palette.search_edit, Qt.Key.Key_Escape)
