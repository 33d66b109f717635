"""The library in the window: list, opening, notes, marks and removal, and its effects on the desk."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import msgspec
import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QMenu, QMessageBox, QPushButton, QWidget
from pytestqt.qtbot import QtBot

from app.paths import library_path
from app.wiring import WindowObjects
from engine.chat.presets import Preset
from engine.library.listed import Listed
from engine.library.notes import SavedDocument
from engine.planning.fit.speed_book import StoredDevice
from tests.support.models import write_tiny_llama
from tests.support.stores import projector_bytes, put
from tests.support.windows import WindowOpener
from widgets.library.library_view import LibraryView


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for name in ("LLAMA_CACHE", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    # The trash is on the disk of the session's home, its place is known from the first use on.
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "home"


@pytest.fixture
def models(home: Path) -> Path:
    """Return the folder of LM Studio's store, with two models."""
    folder = home / ".lmstudio/models/pub"
    for name, kind in (("Ada", "F16"), ("Ada", "Q8_0"), ("Bob", "F16")):
        (folder / name).mkdir(parents=True, exist_ok=True)
        write_tiny_llama(folder / name / f"{name}-{kind}.gguf", file_type=kind, n_layers=2)
    put(folder / "Ada/mmproj-F16.gguf", projector_bytes(n_embd=64))
    return folder


@pytest.fixture
def window(home: Path, open_window: WindowOpener) -> WindowObjects:
    return open_window()


def view_of(window: WindowObjects) -> LibraryView:
    return window.library_presenter.page.view


def is_planned(window: WindowObjects) -> bool:
    shown = window.desk.library.contents.models
    return bool(shown) and all(fit is not None for model in shown for fit in model.fits)


def show_library(window: WindowObjects, qtbot: QtBot) -> LibraryView:
    window.actions["library"].trigger()
    qtbot.waitUntil(lambda: is_planned(window))
    return view_of(window)


def current(view: LibraryView) -> Listed:
    found = view.list_view.current
    assert found is not None
    return found


def test_nothing_is_looked_into_before_anybody_asks(window: WindowObjects, models: Path) -> None:
    assert not window.desk.library.is_awake
    assert not library_path().exists()


def test_the_library_takes_the_screen_and_gives_it_back(window: WindowObjects, models: Path, qtbot: QtBot) -> None:
    main, page = window.main, window.library_presenter.page
    main.docks["report"].hide()
    view = show_library(window, qtbot)
    assert page.is_shown
    assert not any(dock.isVisible() for dock in main.docks.values())
    assert view.visible_titles() == ("Ada", "Bob")
    QTest.keyClick(view.filters.search_edit, Qt.Key.Key_Escape)
    assert not page.is_shown
    assert {name: dock.isVisible() for name, dock in main.docks.items()} == {
        "models": True,
        "report": False,
        "chat": True,
    }


def test_every_arrangement_is_as_it_was_and_leads_back(window: WindowObjects, models: Path, qtbot: QtBot) -> None:
    main, page = window.main, window.library_presenter.page
    window.actions["arrange_chat"].trigger()
    assert not main.pages.isVisible()
    show_library(window, qtbot)
    assert main.pages.isVisible()
    assert not main.docks["chat"].isVisible()
    window.actions["library"].trigger()
    assert not main.pages.isVisible()
    assert [name for name, dock in main.docks.items() if dock.isVisible()] == ["chat"]
    window.actions["library"].trigger()
    window.actions["arrange_place"].trigger()
    assert not page.is_shown
    assert main.editor.isVisible()
    assert not main.docks["chat"].isVisible()


def test_what_a_model_is_and_how_it_fits(window: WindowObjects, models: Path, qtbot: QtBot) -> None:
    view = show_library(window, qtbot)
    ada = current(view)
    assert [each.label for each in ada.entry.quantisations] == ["Q8_0", "F16"]
    assert ada.entry.capabilities == ("images",)
    assert ada.fit is not None
    assert ada.fit.kind == "cpu"
    assert view.details.fit_badge.text() == "fits in memory"
    assert "LM Studio" in view.details.places_label.text()
    assert "mmproj-F16.gguf" in view.details.side_label.text()
    assert not view.details.projector_box.isHidden()
    QTest.keyClicks(view.filters.search_edit, "bob")
    assert view.visible_titles() == ("Bob",)
    assert view.details.projector_box.isHidden()
    QTest.keyClicks(view.filters.search_edit, " x")
    assert view.visible_titles() == ()
    view.clear_button.click()
    assert view.visible_titles() == ("Ada", "Bob")


def test_forecasts_are_made_again_when_speeds_are_others(window: WindowObjects, models: Path, qtbot: QtBot) -> None:
    show_library(window, qtbot)

    def speeds() -> set[float]:
        shelf = window.desk.library.contents
        return {fit.speed for model in shelf.models for fit in model.fits if fit is not None}

    before = speeds()
    keeper = window.desk.speeds
    host = window.desk.rig.live.rig.host
    keeper.learn(keeper.book.with_device(host, StoredDevice(1e8, 1e-5, 1e9)))
    qtbot.waitUntil(lambda: is_planned(window) and speeds().isdisjoint(before))


def test_forecasts_count_projectors_until_they_are_switched_off(
    window: WindowObjects, models: Path, qtbot: QtBot
) -> None:
    view = show_library(window, qtbot)

    def counted() -> set[str]:
        shown = window.desk.library.contents.models
        return {fit.projector for model in shown for fit in model.fits if fit is not None}

    assert counted() == {"mmproj-F16.gguf", ""}, "Bob has none"
    assert "with the projector" in view.details.fit_label.text()
    window.actions["count_projectors"].trigger()
    assert not window.desk.settings.counts_projectors
    qtbot.waitUntil(lambda: is_planned(window) and counted() == {""})
    assert "projector" not in view.details.fit_label.text()


def test_enter_opens_with_the_projector_that_was_ticked(window: WindowObjects, models: Path, qtbot: QtBot) -> None:
    view = show_library(window, qtbot)
    view.details.projector_box.setChecked(True)
    # The header of this projector is one; the engine would want more of it, which nobody asks here.
    view.list_view.setFocus()
    QTest.keyClick(view.list_view, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: window.desk.document.model is not None)
    assert not window.library_presenter.page.is_shown
    document = window.desk.document
    assert document.model is not None
    assert document.model.paths == (models / "Ada/Ada-Q8_0.gguf",)
    assert document.edit is not None
    assert document.edit.side_files.projector is not None
    window.actions["library"].trigger()
    qtbot.waitUntil(lambda: current(view).notes.last_used > 0)


def test_notes_stay_with_the_content_of_a_file(window: WindowObjects, models: Path, qtbot: QtBot) -> None:
    view = show_library(window, qtbot)
    QTest.keyClick(view.list_view, Qt.Key.Key_Space)
    qtbot.waitUntil(lambda: current(view).notes.is_favourite)
    view.details.tags_edit.setText("code, small")
    QTest.keyClick(view.details.tags_edit, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: current(view).notes.tags == ("code", "small"))
    view.details.notes_edit.setPlainText("good at short answers")
    view.list_view.select(1)
    qtbot.waitUntil(lambda: window.desk.library.contents.models[0].notes.text == "good at short answers")
    (models / "Ada").rename(models / "Renamed")
    window.desk.library.scan()
    qtbot.waitUntil(lambda: "Renamed" in str(window.desk.library.contents.models[0].entry.proposed.copy.path))
    qtbot.waitUntil(lambda: window.desk.library.contents.models[0].notes.tags == ("code", "small"))
    view.filters.favourite_button.setChecked(True)
    assert view.visible_titles() == ("Ada",)


def test_a_folder_is_added_watched_and_taken_off(
    window: WindowObjects, models: Path, tmp_path: Path, qtbot: QtBot
) -> None:
    view = show_library(window, qtbot)
    (tmp_path / "more").mkdir()
    window.desk.library.add_folder(tmp_path / "more")
    qtbot.waitUntil(lambda: window.desk.library.contents.folders == (tmp_path / "more",))
    qtbot.waitUntil(lambda: is_planned(window) and view.progress_label.text() == "")
    write_tiny_llama(tmp_path / "more/Cy-F16.gguf", n_layers=2)
    window.desk.library.wake()  # What the watch does every few seconds.
    qtbot.waitUntil(lambda: view.visible_titles() == ("Ada", "Bob", "Cy"))
    qtbot.waitUntil(lambda: is_planned(window) and view.progress_label.text() == "")
    (tmp_path / "more/Cy-F16.gguf").unlink()
    window.desk.library.scan()
    qtbot.waitUntil(lambda: window.desk.library.contents.models[2].entry.proposed.copy.is_missing)
    view.list_view.select(2)
    assert view.details.fit_badge.text() == "missing"
    assert not view.details.open_button.isEnabled()
    view.details.trash_button.click()
    qtbot.waitUntil(lambda: view.visible_titles() == ("Ada", "Bob"))
    window.desk.library.remove_folder(tmp_path / "more")
    qtbot.waitUntil(lambda: window.desk.library.contents.folders == ())


def test_the_trash_is_asked_about_with_the_owners_name(window: WindowObjects, models: Path, qtbot: QtBot) -> None:
    view = show_library(window, qtbot)
    view.list_view.select(1)
    QTest.keyClick(view.list_view, Qt.Key.Key_Delete)

    def boxes() -> list[QMessageBox]:
        return [box for box in window.main.findChildren(QMessageBox) if box.isVisible()]

    qtbot.waitUntil(lambda: bool(boxes()))
    (box,) = boxes()
    assert "LM Studio manages this file" in box.text()
    assert (models / "Bob/Bob-F16.gguf").exists()
    next(button for button in box.findChildren(QPushButton) if "Trash" in button.text()).click()
    qtbot.waitUntil(lambda: view.visible_titles() == ("Ada",))
    assert not (models / "Bob/Bob-F16.gguf").exists()


def test_a_layout_is_kept_under_a_name_and_used_again(window: WindowObjects, models: Path, qtbot: QtBot) -> None:
    view = show_library(window, qtbot)
    view.details.open()
    qtbot.waitUntil(lambda: window.desk.document.model is not None)
    window.actions["library"].trigger()
    view.list_view.select(1)
    view.list_view.select(0)
    assert not view.details.layouts.name_edit.isHidden()
    QTest.keyClicks(view.details.layouts.name_edit, "both on the CPU")
    QTest.keyClick(view.details.layouts.name_edit, Qt.Key.Key_Return)

    def use_buttons() -> list[QPushButton]:
        found = view.details.layouts.findChildren(QPushButton)
        return [button for button in found if button.text() == "Open with Layout" and button.isVisible()]

    qtbot.waitUntil(lambda: bool(use_buttons()))
    document = window.desk.document
    kept = document.edit
    assert kept is not None
    document.set_edit(kept.layout, msgspec.structs.replace(kept.context, n_ctx=1024), "other context")
    use_buttons()[0].click()
    assert not window.library_presenter.page.is_shown
    assert document.edit == kept
    assert document.undo_group.undoText() == "open both on the CPU"
    document.set_edit(kept.layout, msgspec.structs.replace(kept.context, n_ctx=1024), "other context")
    window.desk.opener.open(models / "Bob/Bob-F16.gguf")
    qtbot.waitUntil(lambda: document.model is not None and document.model.paths[0].name == "Bob-F16.gguf")
    window.actions["library"].trigger()
    qtbot.waitUntil(lambda: bool(use_buttons()))
    use_buttons()[0].click()
    qtbot.waitUntil(lambda: document.edit == kept)


def test_a_layout_is_not_given_to_another_model_when_its_own_did_not_open(
    window: WindowObjects, models: Path, qtbot: QtBot
) -> None:
    view = show_library(window, qtbot)
    view.details.open()
    qtbot.waitUntil(lambda: window.desk.document.model is not None)
    window.actions["library"].trigger()
    edit = window.desk.document.edit
    assert edit is not None
    window.desk.document.set_context(msgspec.structs.replace(edit.context, n_ctx=1024))
    text = window.desk.layouts.text()
    assert text is not None
    view.list_view.select(1)
    bob = models / "Bob/Bob-F16.gguf"
    away = bob.rename(bob.with_name("away"))
    with qtbot.waitSignal(window.desk.notices.given, check_params_cb=lambda notice: notice.bad):
        view.details.layouts.use_requested.emit(SavedDocument("layout", "both", text))
    away.rename(bob)
    window.desk.opener.open(bob)
    qtbot.waitUntil(lambda: window.desk.document.model is not None and window.desk.document.model.paths == (bob,))
    assert window.desk.document.edit is not None
    assert window.desk.document.edit.context.n_ctx != 1024
    assert window.desk.document.is_untouched


def test_duplicates_are_told(window: WindowObjects, models: Path, qtbot: QtBot) -> None:
    copy = put(models / "Copy/Copied-F16.gguf", (models / "Bob/Bob-F16.gguf").read_bytes())
    os.link(copy, models / "Copy/Linked-F16.gguf")
    view = show_library(window, qtbot)
    view.duplicates_button.click()
    qtbot.waitUntil(lambda: any(box.isVisible() for box in window.main.findChildren(QMessageBox)))
    (box,) = window.main.findChildren(QMessageBox)
    assert "Duplicates take" in box.text()
    assert all(name in box.text() for name in ("Bob-F16.gguf", "Copied-F16.gguf", "Linked-F16.gguf"))
    box.close()


def test_an_empty_library_offers_models_that_fit(window: WindowObjects, qtbot: QtBot) -> None:
    window.actions["library"].trigger()
    view = view_of(window)
    qtbot.waitUntil(view.starters.isVisible)
    assert 1 <= len(view.starters.cards) <= 3


def test_a_damaged_index_is_said(window: WindowObjects, models: Path, qtbot: QtBot) -> None:
    put(library_path(), b"no database" * 100)
    show_library(window, qtbot)
    assert window.desk.library.contents.aside.endswith("library-kept-1.sqlite")


def test_what_is_only_opened_is_listed_and_may_be_forgotten(
    window: WindowObjects, models: Path, tmp_path: Path, qtbot: QtBot
) -> None:
    path = write_tiny_llama(put(tmp_path / "downloads/Dan-F16.gguf", b""), n_layers=2)
    window.desk.opener.open(path)
    qtbot.waitUntil(lambda: window.desk.document.model is not None)
    qtbot.waitUntil(lambda: path in window.desk.library.catalogue.index.opened())
    view = show_library(window, qtbot)
    assert view.visible_titles() == ("Ada", "Bob", "Dan")
    view.list_view.select(2)
    assert view.details.places_label.text() == f"Opened: {path}"
    path.unlink()
    window.desk.library.scan()
    qtbot.waitUntil(lambda: current(view).entry.proposed.copy.is_missing)
    view.details.trash_button.click()
    qtbot.waitUntil(lambda: view.visible_titles() == ("Ada", "Bob"))
    window.desk.library.scan()
    qtbot.waitUntil(lambda: not window.desk.library.is_scanning)
    assert view.visible_titles() == ("Ada", "Bob")


def test_a_models_conversations_begin_with_its_preset(window: WindowObjects, models: Path, qtbot: QtBot) -> None:
    book = window.desk.presets
    for name in ("brief", "long"):
        book.save(Preset(name=name, settings={"temperature": 0.2}), lambda: None)
    qtbot.waitUntil(lambda: len(book.presets) == 2)
    view = show_library(window, qtbot)
    box = view.details.preset_box
    assert [box.itemText(row) for row in range(box.count())] == ["No preset", "brief", "long"]
    box.setFocus()
    QTest.keyClick(box, Qt.Key.Key_Down)
    qtbot.waitUntil(lambda: current(view).notes.preset == "brief")
    view.details.open()
    conversation = window.desk.models.current.conversation
    qtbot.waitUntil(lambda: conversation.chat.preset == "brief")
    assert conversation.sampling.settings.temperature == 0.2
    book.delete("brief")
    qtbot.waitUntil(lambda: box.currentText() == "brief (removed)")


def test_find_searches_in_what_is_shown(window: WindowObjects, models: Path, qtbot: QtBot) -> None:
    main, page, pane = window.main, window.library_presenter.page, window.views.current.chat
    show_library(window, qtbot)
    main.setFocus()
    window.actions["find_in_chat"].trigger()
    assert main.focusWidget() is page.view.filters.search_edit
    assert not main.docks["chat"].isVisible()
    page.hide()
    window.actions["arrange_place"].trigger()
    window.actions["find_in_chat"].trigger()
    assert main.docks["chat"].isVisible()
    assert main.focusWidget() is pane.find_bar.text_edit
    # The window knows that the chat is shown: the key of the layers hides it again.
    window.actions["arrange_place"].trigger()
    assert not main.docks["chat"].isVisible()


def has_menus(owner: QWidget, menus: list[QMenu]) -> bool:
    return owner.findChildren(QMenu) == menus


@pytest.mark.qt_log_ignore("plugin does not support", extend=True)  # no window manager takes popups to the front
def test_menus_of_the_library_are_deleted_when_they_close(window: WindowObjects, models: Path, qtbot: QtBot) -> None:
    show_library(window, qtbot)
    view = window.library_presenter.page.view
    view.show_find()
    for button, owner in ((view.folders_button, view), (view.find_panel.more_button, view.find_panel)):
        before = owner.findChildren(QMenu)
        button.click()
        (menu,) = (menu for menu in owner.findChildren(QMenu) if menu not in before)
        menu.close()
        qtbot.waitUntil(partial(has_menus, owner, before))
