"""First page, About, F1, and the window after a start that ended without closing."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.demo import Demo
from app.paths import run_records_path
from app.rig.lab import Lab
from app.run_records import EndedRun, OpenedModel, RunRecord, RunRecords
from app.window.about_dialog import AboutDialog
from app.window.handbook import HandbookWindow, page_about
from app.window.library.welcome_presenter import WelcomePresenter
from app.window.recovery import OPENED, Recovery, models_to_reopen
from app.wiring import WindowObjects
from engine.base.errors import EngineError
from engine.devices.rig_file import encode_rig
from engine.planning.layout.layout import Layout, split_evenly
from engine.planning.layout.layout_file import LayoutFile, encode_layout
from engine.planning.settings.context_settings import ContextSettings
from tests.support.accessibility import nameless
from tests.support.models import write_tiny_llama
from tests.support.previews import make_gpu, make_rig
from tests.support.windows import WindowOpener

N_LAYERS = 4


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and two cards; home and data of the program are in it."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    write_tiny_llama(tmp_path / "m.gguf", n_layers=N_LAYERS)
    (tmp_path / "rig.json").write_bytes(encode_rig(make_rig(make_gpu("CUDA0", 12), make_gpu("CUDA1", 16))))
    return tmp_path


@pytest.fixture
def window(folder: Path, open_window: WindowOpener, qtbot: QtBot) -> WindowObjects:
    opened = open_window()
    with qtbot.waitSignal(opened.desk.rig.live.rig_changed):
        opened.desk.rig.files.open(folder / "rig.json")
    return opened


def test_only_the_demo_that_was_asked_for_is_loaded_at_once(
    window: WindowObjects, folder: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    presenter = window.main.findChild(WelcomePresenter)
    assert presenter is not None
    button, opener = presenter.panel.talk_button, window.desk.opener
    loads: list[str] = []

    def load() -> None:
        file = window.desk.models.current.file
        assert file is not None
        loads.append(file.paths[0].name)

    monkeypatch.setattr(window.desk.loader, "load", load)
    monkeypatch.setattr(Lab, "start", lambda _lab, _caps_bytes, then: then())

    def fail() -> Demo:
        raise EngineError("the disk is full")

    monkeypatch.setattr("app.models.opener.find_demo", fail)
    with qtbot.waitSignal(window.desk.notices.given):
        button.click()
    with qtbot.waitSignal(opener.model_changed):
        opener.open(folder / "m.gguf")
    assert loads == []
    demo = write_tiny_llama(folder / "demo.gguf")
    monkeypatch.setattr("app.models.opener.find_demo", lambda: Demo(demo, (1,)))
    button.click()
    qtbot.waitUntil(lambda: bool(loads))
    assert loads == ["demo.gguf"]


def test_the_first_page_says_what_is_here_and_gives_way(
    window: WindowObjects, open_window: WindowOpener, folder: Path, qtbot: QtBot
) -> None:
    presenter = window.main.findChild(WelcomePresenter)
    assert presenter is not None
    panel = presenter.panel
    assert panel.isVisible()
    assert "RTX 3090" in panel.text
    assert "16.00 GiB" in panel.text
    assert "demo model" in panel.talk_button.text(), "nothing was fetched into this home"
    assert nameless(panel) == []
    panel.library_button.click()
    assert window.library_presenter.page.is_shown
    window.library_presenter.page.hide()
    with qtbot.waitSignal(window.desk.opener.model_changed):
        window.desk.opener.open(folder / "m.gguf")
    assert not panel.isVisible()
    assert window.main.editor.view.isVisible()
    again = open_window()
    assert again.main.findChild(WelcomePresenter) is None, "a model was opened before"
    again.main.close()


def test_about_tells_versions_folders_and_licences(window: WindowObjects, qtbot: QtBot, qapp: QApplication) -> None:
    window.actions["about"].trigger()
    qtbot.waitUntil(lambda: window.main.findChild(AboutDialog) is not None)
    dialog = window.main.findChild(AboutDialog)
    assert dialog is not None
    facts = dialog.contents
    for name in ("layerdeck", "llama-cpp-python", "PySide6-Essentials"):
        assert metadata.version(name) in facts.text
    assert "CUDA0 (CUDA)" in facts.text
    assert "Engine packs: none" in facts.text
    assert str(run_records_path().parent) in facts.text
    assert "Permission is hereby granted" in facts.licence or len(facts.licence) > 500
    for name in ("numpy", "msgspec", "pyqtgraph"):
        assert f"{name} {metadata.version(name)}: " in facts.notices
    assert "pytest" not in facts.notices
    assert nameless(dialog) == []
    dialog.copy_button.click()
    assert qapp.clipboard().text() == facts.text
    dialog.close()


def test_f1_opens_the_page_about_what_has_the_keyboard(window: WindowObjects, qtbot: QtBot) -> None:
    main = window.main
    assert page_about(main, None) == "README"
    assert page_about(main, window.views.current.chat.prompt_edit) == "chat"
    assert page_about(main, main.settings_bar.context_editor.n_ctx_box) == "context"
    assert page_about(main, main.device_strip.add_button) == "devices"
    assert page_about(main, window.library_presenter.page.view.filters.search_edit) == "library"
    window.actions["arrange_chat"].trigger()
    window.actions["handbook"].trigger()
    book = main.findChild(HandbookWindow)
    assert book is not None
    assert book.page == "chat"
    qtbot.waitUntil(book.isActiveWindow)
    QTest.keyClick(book, Qt.Key.Key_Escape)
    assert not book.isVisible()


def leave_mark(folder: Path, *before: Path, restored: bool = False) -> Layout:
    """Leave the mark of a window that was killed with files open: `before`, and the model split over both cards, whose
    layout is returned."""
    layout = split_evenly(N_LAYERS, ("CUDA0", "CUDA1"))
    text = encode_layout(LayoutFile(model_name="m", layout=layout, context=ContextSettings(n_ctx=512))).decode()
    models = (*(OpenedModel(str(path), "") for path in before), OpenedModel(str(folder / "m.gguf"), text))
    mark = RunRecord(1, "1:1.00", models, restored)
    run_records_path().mkdir(parents=True)
    (run_records_path() / "1.json").write_bytes(msgspec.json.encode(mark))
    return layout


def follow(window: WindowObjects, qtbot: QtBot) -> tuple[RunRecords, Recovery]:
    """Begin a run as the program does, and wait until it has looked."""
    marks = RunRecords(run_records_path())
    window.follow_run(marks)
    recovery = window.main.findChild(Recovery)
    assert recovery is not None
    qtbot.waitUntil(lambda: recovery.box is not None)
    return marks, recovery


@pytest.fixture
def faults_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the tests' own record of crashes as it is."""
    monkeypatch.setattr("app.run_records.faulthandler.enable", lambda _file: None)
    monkeypatch.setattr("app.run_records.faulthandler.disable", lambda: None)


@pytest.mark.usefixtures("faults_stay")
def test_what_was_open_is_opened_again_and_told(window: WindowObjects, folder: Path, qtbot: QtBot) -> None:
    layout = leave_mark(folder)
    marks, recovery = follow(window, qtbot)
    qtbot.waitUntil(lambda: window.desk.document.edit is not None and window.desk.document.edit.layout == layout)
    assert window.desk.document.edit is not None
    assert window.desk.document.edit.context.n_ctx == 512
    box = recovery.box
    assert box is not None
    qtbot.waitUntil(lambda: box.informativeText().startswith(OPENED))
    assert "1 model" in box.detailedText()
    assert str(folder) not in box.detailedText()
    assert nameless(box) == []
    box.close()

    def noted() -> None:
        mark = msgspec.json.decode((run_records_path() / f"{os.getpid()}.json").read_bytes(), type=RunRecord)
        assert mark.restored
        assert [each.path for each in mark.models] == [str(folder / "m.gguf")]

    qtbot.waitUntil(noted)
    marks.end()
    assert list(run_records_path().iterdir()) == []


@pytest.mark.usefixtures("faults_stay")
def test_a_file_that_does_not_open_leaves_the_others_to_be_opened(
    window: WindowObjects, folder: Path, qtbot: QtBot
) -> None:
    other = write_tiny_llama(folder / "other.gguf", n_layers=N_LAYERS)
    layout = leave_mark(folder, folder / "gone.gguf", other)
    marks, recovery = follow(window, qtbot)
    document, models = window.desk.document, window.desk.models
    qtbot.waitUntil(lambda: document.edit is not None and document.edit.layout == layout)
    assert [model.file.paths[0].name for model in models.all if model.file is not None] == ["other.gguf", "m.gguf"]
    box = recovery.box
    assert box is not None
    qtbot.waitUntil(lambda: box.informativeText().startswith("2 of 3 models were opened again."))
    box.close()
    marks.end()


def ended(seen_s: int, *names: str, restored: bool = False) -> EndedRun:
    models = tuple(OpenedModel(f"/{name}.gguf", layout=str(seen_s)) for name in names)
    return EndedRun(RunRecord(1, "1:1.00", models, restored), seen_s, f"fault at {seen_s}")


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ((ended(3, "a", "b"),), ["a3", "b3"]),
        # A file that was open twice in one window stays so; of several windows the newest has the layout.
        ((ended(3, "a", "a"), ended(2, "b", "a", "c")), ["b2", "c2", "a3", "a3"]),
        ((ended(3, "a", restored=True),), []),
        ((ended(3, "b"), ended(2, "a", restored=True), ended(1, "a", "c")), ["c1", "b3"]),
    ],
)
def test_models_of_all_windows_are_opened_again(runs: tuple[EndedRun, ...], expected: list[str]) -> None:
    assert [f"{Path(each.path).stem}{each.layout}" for each in models_to_reopen(runs)] == expected


@pytest.mark.usefixtures("faults_stay")
def test_what_ended_twice_is_not_opened_a_third_time(window: WindowObjects, folder: Path, qtbot: QtBot) -> None:
    leave_mark(folder, restored=True)
    marks, recovery = follow(window, qtbot)
    assert recovery.box is not None
    assert "not opened again" in recovery.box.informativeText()
    assert window.desk.document.model is None
    recovery.box.close()
    marks.end()


@pytest.mark.usefixtures("faults_stay")
def test_the_report_is_written_where_people_say(
    window: WindowObjects, folder: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_mark(folder, restored=True)
    marks, recovery = follow(window, qtbot)
    assert recovery.box is not None
    save = next(each for each in recovery.box.buttons() if each.text().startswith("Save"))
    monkeypatch.setattr("app.window.dialogs.ask_save", lambda *_words: None)
    save.click()
    assert recovery.box.isVisible(), "the report is nowhere else"
    monkeypatch.setattr("app.window.dialogs.ask_save", lambda *_words: folder / "report.txt")
    with qtbot.waitSignal(window.desk.notices.given):
        save.click()
    assert "Layerdeck" in (folder / "report.txt").read_text(encoding="utf-8")
    recovery.box.close()
    marks.end()
