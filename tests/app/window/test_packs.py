"""Devices > Engine Packs: the list with reasons; installing, switching and removing outside the GUI thread."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QMessageBox, QWidget
from pytestqt.qtbot import QtBot

from app.background import Background
from app.notices import Notices
from app.packs import pack_keys
from app.paths import pack_book_path, packs_path
from app.rig.device_search import DeviceSearch
from app.rig.lab import Lab
from app.rig.limit_store import LimitStore
from app.rig.live_rig import LiveRig
from app.rig.pack_controller import PackController
from app.window.devices.packs_dialog import NOTHING, PacksDialog, PacksPresenter
from engine.base.engine_build import engine_build, engine_version
from engine.devices.packs.store import Pack, PackBook, PackStore, Verdict, file_states, read_book, write_book
from engine.machines.rigs.pack_installer import PackInstaller
from tests.support.packs import no_packs, write_pack, write_signed_pack


@pytest.fixture(autouse=True)
def without_packs() -> Iterator[None]:
    with no_packs():
        yield


@pytest.fixture
def searches() -> list[str]:
    return []


@pytest.fixture
def dialog(qtbot: QtBot, searches: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[PacksDialog]:
    window = QWidget()
    qtbot.addWidget(window)
    background, notices, live = Background(window), Notices(window), LiveRig(window)
    search = DeviceSearch(live, LimitStore(), Lab(live, background, notices), background, notices, parent=window)
    monkeypatch.setattr(search, "judge_again", lambda: searches.append("again"))
    notices.given.connect(lambda notice: searches.append(notice.text))
    shelf = PackController(search, background, notices, window)
    presenter = PacksPresenter(shelf, window, lambda: searches.append("the machine is checked"))
    presenter.show()
    opened = presenter.dialog
    assert opened is not None
    presenter.show()
    assert presenter.dialog is opened
    qtbot.waitUntil(lambda: not shelf.packs.under_way)
    yield opened
    shelf.close()
    background.close()


def put(tmp_path: Path, name: str, *, ok: bool, reason: str = "") -> None:
    """Install a pack of which is known whether it works."""
    pack = PackStore(packs_path()).install(write_pack(tmp_path / f"{name}.tar.gz", name), engine_version())
    library = f"libggml-{name}.so"
    states = file_states(pack.folder, [library])
    verdict = Verdict(name, str(pack.folder), engine_build(), library, states, ok, reason, ("Vulkan0",) if ok else ())
    write_book(pack_book_path(), read_book(pack_book_path()).with_verdict(verdict))


def click(dialog: PacksDialog, name: str) -> None:
    QTest.mouseClick(getattr(dialog, f"{name}_button"), Qt.MouseButton.LeftButton)


def rows(dialog: PacksDialog) -> list[str]:
    items = [[dialog.table.item(row, column) for column in (0, 3)] for row in range(dialog.table.rowCount())]
    return [" ".join(item.text() for item in row if item is not None) for row in items]


def test_without_packs_it_says_what_that_means(dialog: PacksDialog) -> None:
    assert dialog.text == NOTHING
    assert dialog.install_button.isEnabled()
    assert not dialog.remove_button.isEnabled()


def test_packs_are_shown_switched_and_removed(
    qtbot: QtBot, dialog: PacksDialog, searches: list[str], tmp_path: Path
) -> None:
    put(tmp_path, "good", ok=True)
    put(tmp_path, "poor", ok=False, reason="The engine dies (SIGSEGV) when it loads the pack.")
    dialog._controller.refresh()
    good = "good In use: Vulkan0. It is unsigned, so its publisher is unknown."
    poor = "poor Not used. The engine dies (SIGSEGV) when it loads the pack."
    qtbot.waitUntil(lambda: rows(dialog) == [good, poor])
    assert dialog.text == "At least one pack is not in use. The reason is in its row."
    qtbot.waitUntil(lambda: searches == ["again"])  # a pack that came by itself brings devices too
    searches.clear()
    assert dialog.current is not None
    assert (dialog.current.name, dialog.switch_button.text()) == ("good", "Turn Off")

    click(dialog, "switch")
    qtbot.waitUntil(lambda: rows(dialog) == ["good Turned off.", poor])
    assert dialog.switch_button.text() == "Turn On"
    assert searches == ["again"]
    click(dialog, "switch")
    qtbot.waitUntil(lambda: rows(dialog) == [good, poor])
    assert searches == ["again", "again"]

    dialog.table.selectRow(1)
    click(dialog, "remove")
    qtbot.waitUntil(lambda: rows(dialog) == [good])
    assert dialog.text == "All engine packs work."
    assert searches == ["again", "again"]


def test_after_a_good_installation_the_check_of_everything_else_is_offered(
    qtbot: QtBot, dialog: PacksDialog, searches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged(_keeper: PackInstaller, pack: Pack) -> Verdict:
        library = f"libggml-{pack.name}.so"
        devices = ("Vulkan0",) if pack.name == "good" else ()
        states = file_states(pack.folder, [library])
        return Verdict(pack.name, str(pack.folder), engine_build(), library, states, ok=True, devices=devices)

    monkeypatch.setattr(PackInstaller, "_judged", judged)
    for name, offered in (("good", True), ("other", False)):
        archive = write_pack(tmp_path / f"{name}.tar.gz", name)
        monkeypatch.setattr("app.window.dialogs.ask_open", lambda *_, archive=archive: archive)
        click(dialog, "install")
        qtbot.waitUntil(lambda: question(dialog) is not None)
        answer(dialog, "Install")
        qtbot.waitUntil(partial(is_listed, dialog, name))
        assert dialog.machine_button.isVisible() == offered
        assert dialog.text.startswith(
            "A quick test of good with one type of weights has passed." if offered else "All engine packs work."
        )
        if offered:
            searches.clear()
            click(dialog, "machine")
            assert searches == ["the machine is checked"]


def question(dialog: PacksDialog) -> QMessageBox | None:
    return next((box for box in dialog.findChildren(QMessageBox) if box.isVisible()), None)


def answer(dialog: PacksDialog, text: str) -> None:
    box = question(dialog)
    assert box is not None
    next(button for button in box.buttons() if button.text().replace("&", "") == text).click()


def test_an_unsigned_pack_is_installed_only_when_people_say_so(
    qtbot: QtBot, dialog: PacksDialog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = write_pack(tmp_path / "x.tar.gz", "x")
    monkeypatch.setattr("app.window.dialogs.ask_open", lambda *_: archive)
    click(dialog, "install")
    qtbot.waitUntil(lambda: question(dialog) is not None)
    box = question(dialog)
    assert box is not None
    assert "It is unsigned, so its publisher is unknown." in box.informativeText()
    answer(dialog, "Cancel")
    assert not (packs_path() / "x").exists()


def test_a_pack_that_was_built_here_is_installed_without_a_question(
    qtbot: QtBot, dialog: PacksDialog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged(_keeper: PackInstaller, pack: Pack) -> Verdict:
        return Verdict(pack.name, str(pack.folder), engine_build(), "libggml-x.so", (), ok=True)

    monkeypatch.setattr(PackInstaller, "_judged", judged)
    archive = write_signed_pack(tmp_path / "x.tar.gz", "x", pack_keys())
    monkeypatch.setattr("app.window.dialogs.ask_open", lambda *_: archive)
    click(dialog, "install")
    qtbot.waitUntil(lambda: is_listed(dialog, "x"))
    assert question(dialog) is None


def is_listed(dialog: PacksDialog, name: str) -> bool:
    return any(name in row for row in rows(dialog))


def test_a_file_that_is_no_pack_is_told_and_changes_nothing(
    qtbot: QtBot, dialog: PacksDialog, searches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "song.tar.gz"
    file.write_bytes(b"la la la")
    monkeypatch.setattr("app.window.dialogs.ask_open", lambda *_: file)
    click(dialog, "install")
    qtbot.waitUntil(lambda: bool(searches))
    assert "song.tar.gz" in searches[0]
    assert read_book(pack_book_path()) == PackBook()
    qtbot.waitUntil(dialog.install_button.isEnabled)
