"""Questions before actions of the window, files that are dropped on it, and its closing."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QMimeData, QPointF, Qt, QUrl
from PySide6.QtGui import QDropEvent
from PySide6.QtWidgets import QFileDialog, QMessageBox, QWidget
from pytestqt.qtbot import QtBot

from app.library.catalogue import LibraryContents
from app.notices import Notice
from app.rig.device_list import list_of_file
from app.window.dialogs import ask_save
from app.wiring import WindowObjects
from engine.base.units import GIB
from engine.devices.device import Rig, make_host
from engine.devices.rig_file import write_rig
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from tests.support.models import write_tiny_llama

HOST = make_host("host", 16 * GIB, 8 * GIB)


@pytest.fixture
def told(window: WindowObjects) -> list[Notice]:
    seen: list[Notice] = []
    window.desk.notices.given.connect(seen.append)
    return seen


def answer(monkeypatch: pytest.MonkeyPatch, name: str, path: Path | None) -> list[tuple[object, ...]]:
    """Have the file dialog `name` answer `path`; return what it is asked."""
    asked: list[tuple[object, ...]] = []

    def ask(_parent: QWidget, *question: object) -> Path | None:
        asked.append(question)
        return path

    monkeypatch.setattr(f"app.window.dialogs.{name}", ask)
    return asked


def test_a_file_that_is_dropped_is_opened_as_what_its_name_says(
    window: WindowObjects, told: list[Notice], qtbot: QtBot, tmp_path: Path
) -> None:
    def drop(name: str) -> None:
        data = QMimeData()
        data.setUrls([QUrl("http://192.0.2.1/remote.gguf"), QUrl.fromLocalFile(str(tmp_path / name))])
        copy, left, none = Qt.DropAction.CopyAction, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
        window.main.dropEvent(QDropEvent(QPointF(9, 9), copy, data, left, none))

    drop("layout.JSON")
    assert told[-1].text.startswith("Open the model first")
    drop("away.gguf")
    qtbot.waitUntil(lambda: "away.gguf" in told[-1].text)
    assert told[-1].bad


def test_what_is_chosen_is_opened_and_a_cancel_does_nothing(
    window: WindowObjects, told: list[Notice], qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "ask_open", None)
    answer(monkeypatch, "ask_save", None)
    for name in ("open_model", "open_rig", "save_rig"):
        window.actions[name].trigger()
    window.questions.open_layout()
    window.questions.save_layout()
    assert told == []
    write_rig(tmp_path / "rig.json", Rig((), HOST))
    answer(monkeypatch, "ask_open", tmp_path / "rig.json")
    window.actions["open_rig"].trigger()
    qtbot.waitUntil(lambda: told == [Notice("Using the devices in rig.json", bad=False)])


def test_a_model_is_looked_for_where_models_are(
    window: WindowObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answer(monkeypatch, "ask_open", None)
    folder = tmp_path / "models"
    folder.mkdir()
    window.desk.library.contents = LibraryContents(folders=(folder,))
    window.actions["open_model"].trigger()
    assert asked[0][-1] == folder


def test_a_layout_is_saved_under_the_name_of_its_model(
    window: WindowObjects, told: list[Notice], qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, model = window.desk, read_model(write_tiny_llama(tmp_path / "tiny.gguf", n_layers=4))
    desk.rig.live.set_devices(list_of_file(Rig((), HOST), found=Rig((), HOST)))
    desk.document.open(model, desk.rig.live.rig, Edit(single_device(4, "CPU"), ContextSettings(n_ctx=256)))
    desk.prober.close()
    asked = answer(monkeypatch, "ask_save", tmp_path / "kept.json")
    window.questions.save_layout()
    assert asked[0][-1] == "tiny.layout.json"
    qtbot.waitUntil(lambda: told == [Notice("Saved kept.json", bad=False)])
    assert (tmp_path / "kept.json").exists()


def test_the_window_closes_its_desk_once(window: WindowObjects) -> None:
    closings: list[str] = []
    window.main.closing.connect(lambda: closings.append("closed"))
    window.main.close()
    window.main.close()
    assert closings == ["closed"]


@pytest.mark.parametrize(
    ("typed", "proposal", "wanted"),
    [
        ("report", "layerdeck-report.txt", "report.txt"),
        ("my.report", "rig.json", "my.report"),
        ("kept", "rig.json", "kept.json"),
    ],
)
def test_a_name_without_an_ending_gets_that_of_the_proposed_file(
    qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, proposal: str, wanted: str
) -> None:
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_words: (str(tmp_path / typed), ""))
    parent = QWidget()
    qtbot.addWidget(parent)
    assert ask_save(parent, "Save", "", proposal) == tmp_path / wanted


@pytest.mark.parametrize("answer", [QMessageBox.StandardButton.Yes, QMessageBox.StandardButton.No])
def test_an_extension_that_leads_to_an_existing_file_is_asked_about(
    qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: QMessageBox.StandardButton
) -> None:
    asked: list[str] = []

    def ask(box: QMessageBox) -> QMessageBox.StandardButton:
        asked.append(box.text())
        return answer

    monkeypatch.setattr(QMessageBox, "exec", ask)
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_words: (str(tmp_path / "kept"), ""))
    parent = QWidget()
    qtbot.addWidget(parent)
    kept = tmp_path / "kept.json"
    assert ask_save(parent, "Save", "", "rig.json") == kept
    assert not asked
    kept.touch()
    assert ask_save(parent, "Save", "", "rig.json") == (kept if answer == QMessageBox.StandardButton.Yes else None)
    assert asked == ["kept.json already exists. Do you want to replace it?"]
