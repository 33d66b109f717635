"""Settings, bug reports, background work, and the questions of the rig dialogs."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication, QWidget
from pytestqt.qtbot import QtBot

from app.background import Background, Task, Worker
from app.bug_report import BugDialog, BugReporter, describe_bug, scrub
from app.library.hub_access import HubAccess, SavedHub
from app.notices import Notice, Notices
from app.settings import MAX_RECENT, Settings, StoredSideFiles, _IniStore
from app.window.devices.rig_dialogs import LineDialog, parse_caps
from app.window.status_line import StatusLine
from engine.base.errors import ArgumentError, EngineError
from engine.base.units import GIB, MIB
from engine.devices.endpoint import parse_endpoint
from tests.support.patience import DEADLINE_S
from widgets.common.dialog import Dialog
from widgets.library.recent_models import RecentModel

ROOT = Path(__file__).resolve().parents[2]


def test_settings_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "settings.ini"
    first = Settings(path)
    first.theme = "dark"
    first.remote_warning_given = True
    for number in range(MAX_RECENT + 3):
        first.add_recent_model(RecentModel(Path(f"/models/{number}.gguf"), f"model {number}", "F16"))
    again_opened = RecentModel(Path("/models/5.gguf"), "five", "Q4_K · 1 GiB, “ö”")
    first.add_recent_model(again_opened)
    first.sync()
    again = Settings(path)
    assert again.theme == "dark"
    assert again.remote_warning_given
    assert again.recent_models[0] == again_opened
    assert len({recent.path for recent in again.recent_models}) == len(again.recent_models) == MAX_RECENT
    again.forget_recent_model(again_opened.path)
    assert again_opened not in again.recent_models
    again.forget_recent_models()
    assert again.recent_models == ()


@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe garbage", b"[General]\ntheme=@Invalid()\nrecent_models=7\n"])
def test_a_spoilt_settings_file_is_as_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "settings.ini"
    path.write_bytes(content)
    settings = Settings(path)
    assert settings.theme == "system"
    assert not settings.remote_warning_given
    assert settings.window_state() is None
    assert settings.recent_models == ()


_OTHER_WINDOW = """
import sys
from pathlib import Path
from app.settings import StoredSideFiles, Settings
from widgets.library.recent_models import RecentModel
settings, model = Settings(Path(sys.argv[1])), Path("/models/other.gguf")
settings.add_recent_model(RecentModel(model, "other", ""))
settings.store_side_files(model, StoredSideFiles(projector="/models/mmproj.gguf"))
settings.keep_parked(model, parked=True)
settings.sync()
"""


def test_two_open_windows_keep_each_others_lists(tmp_path: Path) -> None:
    path, ours, other = tmp_path / "settings.ini", Path("/models/ours.gguf"), Path("/models/other.gguf")
    settings = Settings(path)
    settings.add_recent_model(RecentModel(ours, "ours", ""))
    settings.sync()
    # In a process of its own: within one, all objects for a file share their values.
    subprocess.run([sys.executable, "-c", _OTHER_WINDOW, str(path)], cwd=ROOT, timeout=DEADLINE_S, check=True)
    settings.keep_parked(ours, parked=True)
    settings.store_side_files(ours, StoredSideFiles(projector="/models/b.gguf"))
    settings.add_recent_model(RecentModel(ours, "ours", ""))
    assert [each.path for each in settings.recent_models] == [ours, other]
    assert settings.parked_models == (ours, other)
    assert settings.side_files(other).projector == "/models/mmproj.gguf"
    assert settings.side_files(ours).projector == "/models/b.gguf"


def test_two_open_windows_keep_each_others_settings_of_the_hub(tmp_path: Path) -> None:
    settings, notices = Settings(tmp_path / "settings.ini"), Notices()
    ours, theirs = HubAccess(settings, notices), HubAccess(settings, notices)
    theirs.set_mirror("https://hub.example")
    ours.set_offline(True)
    assert not ours.kept.mirror
    assert HubAccess(settings, notices).kept == SavedHub("https://hub.example", offline=True)


def test_settings_that_cannot_be_stored_are_tried_again_by_one_timer(tmp_path: Path, qapp: QApplication) -> None:
    told: list[str] = []
    store = _IniStore(tmp_path)  # A folder cannot be written as a file.
    store.on_fault = lambda sentence, _is_bad: told.append(sentence)
    for host in ("first", "second"):
        store.setValue("serve/host", host)
        qapp.processEvents()
    assert len(told) == 1
    assert [timer.isActive() for timer in store.findChildren(QTimer)] == [True]


def test_a_report_does_not_name_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    try:
        raise RuntimeError(f"cannot read {tmp_path}/models/secret.gguf")
    except RuntimeError as error:
        text = describe_bug(error)
    assert str(tmp_path) not in text
    assert "~/models/secret.gguf" in text
    assert scrub("/a/b", Path("/")) == "/a/b"


def test_the_bug_dialog_copies_what_it_shows(qtbot: QtBot) -> None:
    dialog = BugDialog("first report")
    qtbot.addWidget(dialog)
    dialog.add("second report")
    dialog._on_copy()
    assert QApplication.clipboard().text() == dialog.text()
    assert "second report" in dialog.text()


@pytest.fixture
def reporter(qtbot: QtBot, caplog: pytest.LogCaptureFixture) -> BugReporter:
    """A reporter with a visible main window. With `caplog` the bugs may be logged."""
    result = BugReporter()
    result.window = QWidget()
    qtbot.addWidget(result.window)
    result.window.show()
    return result


def test_a_bug_is_shown_after_the_dialog_of_the_last_one_was_deleted(qtbot: QtBot, reporter: BugReporter) -> None:
    question = Dialog("a question", reporter.window, once=True)
    question.setModal(True)
    question.show()
    reporter.report(ValueError("first bug"))
    qtbot.waitUntil(lambda: bool(question.findChildren(BugDialog)))
    with qtbot.waitSignal(question.destroyed):
        question.close()
    reporter.report(ValueError("second bug"))
    assert reporter.window is not None
    qtbot.waitUntil(lambda: bool(reporter.window and reporter.window.findChildren(BugDialog)))
    assert "second bug" in reporter.window.findChildren(BugDialog)[0].text()


def test_a_bug_report_belongs_to_the_main_window_even_if_no_window_is_active(
    qtbot: QtBot, reporter: BugReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", None)  # as without a console on Windows
    other = QWidget()
    qtbot.addWidget(other)
    other.show()
    other.activateWindow()
    reporter.report(ValueError("a bug"))
    assert reporter.window is not None
    # A dialog without a parent would keep the process running after the main window has closed.
    qtbot.waitUntil(lambda: bool(reporter.window and reporter.window.findChildren(BugDialog)))


def test_background_work_answers_in_the_gui_thread(qtbot: QtBot) -> None:
    background = Background()
    seen: list[tuple[str, object, bool]] = []
    gui = threading.current_thread()

    def fail() -> int:
        raise ArgumentError("no such thing")

    def on_result(value: int) -> None:
        seen.append(("result", value, threading.current_thread() is gui))

    def on_error(error: EngineError) -> None:
        seen.append(("error", error.summary(), threading.current_thread() is gui))

    background.run("good", lambda: 7, on_result, on_error)
    qtbot.waitUntil(lambda: len(seen) == 1)
    background.run("bad", fail, on_result, on_error)
    qtbot.waitUntil(lambda: len(seen) == 2)
    assert seen == [("result", 7, True), ("error", "no such thing", True)]


def test_background_work_says_what_is_waited_for(qtbot: QtBot) -> None:
    background = Background()
    release = threading.Event()
    busy: list[str] = []
    done: list[object] = []
    background.busy_changed.connect(busy.append)
    background.run("Reading a", lambda: release.wait(DEADLINE_S), done.append, lambda error: None)
    background.run("Reading b", lambda: 1, done.append, lambda error: None)
    background.run("probe", lambda: 2, done.append, lambda error: None, quiet=True)
    qtbot.waitUntil(lambda: len(done) == 2)
    assert busy == ["Reading a", "Reading b", "Reading a"]
    release.set()
    qtbot.waitUntil(lambda: len(done) == 3)
    assert busy[-1] == ""


def test_bad_news_outlives_what_is_waited_for_and_good_news_do_not_stay(qtbot: QtBot) -> None:
    line = StatusLine()
    qtbot.addWidget(line)
    line.show_notice(Notice("bad"))
    line.set_busy("a", "Reading x")
    line.set_busy("b", "Loading")
    assert line.text() == "Loading…"
    line.set_busy("b", "")
    assert line.text() == "Reading x…"
    line.set_busy("a", "")
    assert (line.text(), line.property("role")) == ("bad", "error")
    line.withdraw("another")
    assert line.text() == "bad"
    line.withdraw("bad")
    assert line.text() == ""
    line._timer.setInterval(1)
    line.show_notice(Notice("good", bad=False))
    assert line.text() == "good"
    qtbot.waitUntil(lambda: line.text() == "")


def test_of_requests_that_replace_each_other_only_the_last_one_is_delivered(qtbot: QtBot) -> None:
    background = Background()
    latest, started = background.latest(), threading.Event()
    told: list[str] = []

    def wait_for_the_end(task: Task[str]) -> str:
        ended = threading.Event()
        started.set()
        with task.token.waking(ended.set):
            ended.wait()
        task.report("late progress")
        return "first"

    def work(task: Task[str]) -> str:
        task.report("half")
        return "second"

    def fail(error: EngineError) -> None:
        told.append(error.summary())

    latest.run("first", wait_for_the_end, told.append, fail, told.append)
    started.wait()
    assert latest.is_running
    latest.run("second", work, told.append, fail, told.append)
    qtbot.waitUntil(lambda: not latest.is_running)
    assert told == ["half", "second"]

    def refuse(_task: Task[None]) -> str:
        raise EngineError("no")

    latest.run("third", refuse, told.append, fail)
    qtbot.waitUntil(lambda: told[-1] == "no")
    latest.run("fourth", lambda _task: "fourth", told.append, fail)
    latest.cancel()
    assert not latest.is_running
    # What comes after it in the same queue shows that its result was dropped.
    with qtbot.waitSignal(background.busy_changed, check_params_cb=lambda what: not what):
        pass
    assert told == ["half", "second", "no"]
    background.close()


def test_a_request_that_is_stopped_still_tells_what_it_has(qtbot: QtBot) -> None:
    latest, told = Background().latest(), list[object]()

    def work(task: Task[int]) -> str:
        task.report(1)
        while not task.token.cancelled:
            pass
        return "half"

    latest.run("work", work, told.append, told.append, told.append)
    qtbot.waitUntil(lambda: told == [1])
    assert latest.is_running
    latest.stop()
    qtbot.waitUntil(lambda: told == [1, "half"])
    assert not latest.is_running


def test_the_end_waits_for_a_request_that_runs(qtbot: QtBot) -> None:
    latest, ended = Background().latest(), list[bool]()

    def work(task: Task[int]) -> None:
        while not task.token.cancelled:
            pass
        ended.append(True)

    latest.run("work", work, lambda _result: None, lambda _error: None)
    latest.close(DEADLINE_S)
    assert ended == [True]


def test_closed_background_work_tells_nobody(qtbot: QtBot) -> None:
    background = Background()
    release, done = threading.Event(), threading.Event()
    told: list[int] = []

    def work() -> int:
        release.wait(DEADLINE_S)
        done.set()
        return 1

    background.run("late", work, told.append, lambda error: None)
    background.close()
    release.set()
    assert done.wait(DEADLINE_S)
    QApplication.processEvents()
    assert told == []


def test_caps_are_read_as_people_write_them() -> None:
    assert parse_caps("256MiB, 1 GiB") == (256 * MIB, GIB)


@pytest.mark.parametrize("text", ["", "256MiB,", "0", "lots", "-5MiB", ",".join(["1GiB"] * 16)])
def test_bad_caps_are_explained(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_caps(text)


def test_a_bad_address_keeps_the_dialog_open_with_the_text(qtbot: QtBot) -> None:
    parent = QWidget()
    qtbot.addWidget(parent)
    accepted: list[str] = []
    dialog = LineDialog(parent, "Add a remote worker", "help", "", parse_endpoint)
    dialog.entered.connect(accepted.append)
    dialog.show()
    dialog.line.setText("attic:notaport")
    dialog.accept()
    assert dialog.isVisible()
    assert dialog.line.text() == "attic:notaport"
    assert dialog.problem_label.text()
    dialog.line.setText("attic:50052")
    dialog.accept()
    assert accepted == ["attic:50052"]


def test_work_of_one_worker_is_done_in_its_order(qtbot: QtBot) -> None:
    background, worker = Background(), Worker("test")
    may_begin = threading.Event()
    written: list[str] = []
    told: list[str] = []
    failed: list[EngineError] = []

    def write_slowly() -> None:
        assert may_begin.wait(DEADLINE_S)
        written.append("first")

    background.run("first", write_slowly, lambda _: told.append("first"), failed.append, worker=worker)
    background.run(
        "second", lambda: written.append("second"), lambda _: told.append("second"), failed.append, worker=worker
    )
    background.run("beside", lambda: None, lambda _: may_begin.set(), failed.append)
    qtbot.waitUntil(lambda: told == ["first", "second"])
    assert written == ["first", "second"]
    assert not failed
