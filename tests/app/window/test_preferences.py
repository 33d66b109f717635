"""The preferences page: each field has a menu entry, and changes apply at once. Loading the last model at start."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path

import msgspec
import pytest
from PySide6.QtWidgets import QPushButton
from pytestqt.qtbot import QtBot

from app.run_records import VERSION, EndedRun, RunRecord, RunRecords
from app.window.preferences import PreferencesDialog
from app.wiring import WindowObjects
from engine.base.errors import RigError
from engine.chat.database import name_of
from engine.devices.device import Rig
from engine.runtime.session.load_spec import LoadSpec
from tests.support.models import write_tiny_llama
from tests.support.windows import WindowOpener
from widgets.common.text import set_zoom
from widgets.library.load_question import LoadDecision


def page(window: WindowObjects) -> PreferencesDialog:
    window.actions["preferences"].trigger()
    (dialog,) = window.main.findChildren(PreferencesDialog)
    assert dialog.isVisible()
    return dialog


def test_a_field_of_the_page_is_an_entry_of_the_menus(window: WindowObjects) -> None:
    dialog, settings = page(window), window.desk.settings
    for name, kept in (
        ("step_back", "steps_back"),
        ("reload_lost", "reload_lost"),
        ("ask_when_full", "asks_when_full"),
        ("load_last_model", "loads_last_model"),
    ):
        box = dialog.switches[name]
        assert not box.isChecked()
        box.click()
        assert window.actions[name].isChecked()
        assert getattr(settings, kept) is True
        window.actions[name].trigger()
        assert not box.isChecked()
    assert window.actions["preferences"].shortcut().toString() == "Ctrl+,"
    dialog.close()


def test_the_button_to_be_asked_again_changes_the_box_beside_it(window: WindowObjects) -> None:
    window.desk.settings.without_room = LoadDecision.UNLOAD
    dialog = page(window)
    assert dialog.idle_models_box.currentText() == "Unload models"
    button = next(each for each in dialog.findChildren(QPushButton) if each.text().startswith("Ask before"))
    button.click()
    assert window.desk.settings.without_room is None
    assert dialog.idle_models_box.currentText() == "Ask"
    dialog.close()


def test_the_stall_limit_is_chosen_on_the_page(open_window: WindowOpener, tmp_path: Path, qtbot: QtBot) -> None:
    window = open_window()
    dialog, settings = page(window), window.desk.settings
    assert (settings.stall_limit_s, dialog.stall_box.value()) == (None, 60)
    above, below = dialog.switches["reload_lost"], dialog.switches["count_projectors"]
    assert above.y() < dialog.stall_box.y() < below.y(), "it belongs to Loading"
    dialog.stall_box.setValue(0)  # The box has no such value.
    assert (settings.stall_limit_s, dialog.stall_box.value()) == (5, 5)
    dialog.stall_box.setValue(300)
    specs: list[LoadSpec] = []
    with qtbot.waitSignal(window.desk.opener.model_changed):
        window.desk.opener.open(write_tiny_llama(tmp_path / "ada.gguf", n_layers=2))
    loading = window.desk.models.current.loading
    loading.load = lambda spec, **_: specs.append(spec)  # type: ignore[method-assign]
    window.desk.loader.load()
    qtbot.waitUntil(lambda: len(specs) == 1)
    assert specs[0].stall_limit_s == 300
    dialog.close()
    settings.store.setValue("stall_limit_s", "0")
    assert settings.stall_limit_s is None


def test_colours_language_and_zoom_are_chosen_on_the_page(window: WindowObjects) -> None:
    dialog, settings = page(window), window.desk.settings
    dialog.theme_box.setCurrentIndex(0)
    dialog.theme_box.activated.emit(0)
    assert (settings.theme, window.theme.name) == ("light", "light")
    window.actions["theme_dark"].trigger()
    assert dialog.theme_box.currentText() == "Dark"
    try:
        dialog.zoom_box.activated.emit(dialog.zoom_box.findData(150))
        assert (settings.zoom_percent, dialog.zoom_box.currentData()) == (150, 150)
        dialog.zoom_box.activated.emit(dialog.zoom_box.findData(90))
        assert settings.zoom_percent == 90
        window.actions["zoom_reset"].trigger()
        assert dialog.zoom_box.currentData() == 100
    finally:
        set_zoom(1.0)
    dialog.close()


@pytest.mark.parametrize("wanted", [True, False])
def test_the_last_model_is_loaded_at_the_start_of_those_who_want_it(
    open_window: WindowOpener, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    first = open_window()
    with qtbot.waitSignal(first.desk.opener.model_changed):
        first.desk.opener.open(write_tiny_llama(tmp_path / "ada.gguf", n_layers=2))
    first.desk.settings.loads_last_model = wanted
    first.main.close()

    again = open_window()
    loads: list[str] = []
    monkeypatch.setattr(again.desk.loader, "load", lambda: loads.append(again.desk.models.current.name))
    marks = RunRecords(tmp_path / "runs")
    looked: list[str] = []

    def take_ended() -> tuple[EndedRun, ...]:
        looked.append("looked")
        return ()

    monkeypatch.setattr(marks, "take_ended", take_ended)
    again.desk.rig.live.end_search()
    again.follow_run(marks)
    qtbot.waitUntil(lambda: loads == ["ada"] if wanted else bool(looked))
    qtbot.waitUntil(lambda: not again.desk.opener.is_opening)
    assert bool(again.desk.document.model) is wanted
    marks.end()


def test_the_chat_offers_to_load_the_last_model(
    open_window: WindowOpener, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_window()
    with qtbot.waitSignal(first.desk.opener.model_changed):
        first.desk.opener.open(write_tiny_llama(tmp_path / "ada.gguf", n_layers=2))
    title = first.desk.settings.recent_models[0].title
    first.main.close()

    again = open_window()
    loads: list[str] = []
    monkeypatch.setattr(again.desk.loader, "load", lambda: loads.append(again.desk.models.current.name))
    chat = again.views.current.chat
    assert chat.start_banner.button.text() == f"Load {title}"
    chat.start_requested.emit()
    qtbot.waitUntil(lambda: loads == ["ada"])


def follow_again(
    open_window: WindowOpener, qtbot: QtBot, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[WindowObjects, RunRecords, list[str]]:
    """Open a window of a user who wants the last model; return it with its mark and the models that it loads."""
    first = open_window()
    with qtbot.waitSignal(first.desk.opener.model_changed):
        first.desk.opener.open(write_tiny_llama(folder / "ada.gguf", n_layers=2))
    first.desk.settings.loads_last_model = True
    first.main.close()
    again = open_window()
    loads: list[str] = []
    monkeypatch.setattr(again.desk.loader, "load", lambda: loads.append(again.desk.models.current.name))
    return again, RunRecords(folder / "runs"), loads


def looked(marks: RunRecords, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that grows when the window has looked for other windows."""
    seen: list[bool] = []
    has_others = marks.has_others

    def look() -> bool:
        seen.append(has_others())
        return seen[-1]

    monkeypatch.setattr(marks, "has_others", look)
    return seen


def settle(window: WindowObjects, qtbot: QtBot) -> None:
    """Wait until results of background work that has ended are delivered."""
    delivered: list[None] = []
    window.desk.background.run("Waiting", lambda: None, delivered.append, window.desk.notices.show_error, quiet=True)
    qtbot.waitUntil(lambda: bool(delivered))


@pytest.mark.parametrize("is_found", [True, False])
def test_the_last_model_waits_for_the_devices(
    open_window: WindowOpener, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_found: bool
) -> None:
    again, marks, loads = follow_again(open_window, qtbot, tmp_path, monkeypatch)
    seen = looked(marks, monkeypatch)
    again.follow_run(marks)
    qtbot.waitUntil(lambda: bool(seen))
    settle(again, qtbot)
    assert not again.desk.opener.is_opening

    def find() -> Rig:
        if not is_found:
            raise RigError("no devices")
        return Rig((), again.desk.rig.live.rig.host)

    monkeypatch.setattr(again.desk.rig.search, "find", find)
    again.desk.rig.search.refresh()
    qtbot.waitUntil(lambda: loads == ["ada"])
    marks.end()


def test_a_second_window_does_not_load_the_last_model(
    open_window: WindowOpener, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again, marks, loads = follow_again(open_window, qtbot, tmp_path, monkeypatch)
    seen = looked(marks, monkeypatch)
    (tmp_path / "runs").mkdir()
    # The parent of this process stands for another window.
    mark = RunRecord(VERSION, name_of(os.getppid()))
    (tmp_path / "runs" / "1.json").write_bytes(msgspec.json.encode(mark))
    again.desk.rig.live.end_search()
    again.follow_run(marks)
    qtbot.waitUntil(lambda: seen == [True])
    settle(again, qtbot)
    assert not again.desk.opener.is_opening
    assert loads == []
    marks.end()


def test_idle_models_and_their_time_are_chosen_on_the_page(window: WindowObjects) -> None:
    dialog, settings = page(window), window.desk.settings
    model = window.desk.models.current
    assert [dialog.idle_models_box.itemText(row) for row in range(3)] == ["Ask", "Unload models", "Keep models loaded"]
    dialog.idle_models_box.activated.emit(1)
    assert settings.without_room is LoadDecision.UNLOAD
    dialog.idle_time_box.activated.emit(3)
    assert (settings.idle_time_s, model.keep_alive_s) == (300.0, 300.0)
    # A time that was chosen for a model stays.
    model.keep_alive(1800.0)
    dialog.idle_time_box.activated.emit(0)
    assert settings.idle_time_s == inf
    assert model.keep_alive_s == 1800.0
    dialog.close()
    window.actions["ask_unload"].trigger()
    dialog.show()
    assert dialog.idle_models_box.currentText() == "Ask"
    dialog.close()
