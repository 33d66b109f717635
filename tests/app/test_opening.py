"""The start of the window: it is shown when complete, unless it was closed before."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from PySide6.QtCore import QEvent, QObject, Qt, QTimer
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QMainWindow
from pytestqt.qtbot import QtBot

from app import paths
from app.gui import serve_later_starts, skip_feature_search
from app.notices import Notice
from app.opening import Opening, StartOptions
from app.settings import Settings
from app.single_instance import FirstInstance
from app.theme import Theme
from app.wiring import WindowObjects
from tests.support.patience import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
NOT_BEFORE_THE_PICTURE = (
    "asyncio",
    "cryptography",
    "http.client",
    "httpx",
    "llama_cpp",
    "numpy",
    "pyqtgraph",
    "ziamath",
)
"""Packages that take long to import, and that nothing in the first picture needs."""
SECOND = (
    "import sys; from pathlib import Path; from PySide6.QtCore import QCoreApplication;"
    "from app.single_instance import hand_over; QCoreApplication([]);"
    "print(hand_over(sys.argv[1], [Path(sys.argv[2])]))"
)
PAINTED = """
import sys
from PySide6.QtCore import QEvent, QObject, QTimer
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication
application = QApplication([])
class FirstPaint(QObject):
    seen = False
    def eventFilter(self, _watched, event):
        if event.type() is QEvent.Type.Paint and not self.seen:
            self.seen = True
            QTimer.singleShot(0, self.tell)
        return False
    def tell(self):
        main = opening.frame.main
        print(*sys.modules)
        print(all(menu.actions() for menu in main.menus.values()) and main.editor.findChild(WelcomePanel).isVisible())
        opening.frame.main.close()
first = FirstPaint()
application.installEventFilter(first)
import app.gui
from app.logs import start_logging
from app.notices import Notice
from app.opening import Opening, StartOptions
from app.paths import log_path
from app.settings import Settings
from app.single_instance import hand_over
from app.theme import Theme
from widgets.library.welcome_panel import WelcomePanel
hand_over("nobody", [])
start_logging(log_path())
opening = Opening(Settings(), Theme(application, "dark"), StartOptions())
opening.show()
application.exec()
"""


def open_window(qapp: QApplication, folder: Path, options: StartOptions) -> Opening:
    return Opening(Settings(folder / "settings.ini"), Theme(qapp, "dark"), options)


def test_the_first_picture_is_whole(tmp_path: Path) -> None:
    places = {name: str(tmp_path) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")}
    command = [sys.executable, "-c", PAINTED]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **places}, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    modules, is_whole = run.stdout.splitlines()
    imported = modules.split()
    assert is_whole == "True"
    assert [heavy for heavy in NOT_BEFORE_THE_PICTURE if heavy in imported] == []


def test_a_start_that_is_ended_early_shows_nothing(qtbot: QtBot, qapp: QApplication, tmp_path: Path) -> None:
    opening = open_window(qapp, tmp_path, StartOptions())
    # Deleted here, in the GUI thread: a garbage collection in a thread of the next test would crash.
    qtbot.addWidget(opening.frame.main)
    with qtbot.assertNotEmitted(opening.opened):
        opening.show()
        assert not opening.frame.main.isVisible()
        opening.frame.main.close()
        qapp.processEvents()
    assert not opening.frame.main.isVisible()


class _CloserWhenShown(QObject):
    """Closes the window in the first pass of the event loop after it is shown."""

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Show and isinstance(watched, QMainWindow):
            QTimer.singleShot(0, watched.close)
        return False


def test_a_window_that_is_closed_right_after_it_was_shown_starts_nothing(
    qtbot: QtBot, qapp: QApplication, tmp_path: Path
) -> None:
    opening = open_window(qapp, tmp_path, StartOptions())
    main = opening.frame.main
    qtbot.addWidget(main)
    main.installEventFilter(_CloserWhenShown(main))
    with qtbot.assertNotEmitted(opening.opened):
        with qtbot.waitSignal(main.closing):
            opening.show()
        qapp.processEvents()


def test_pyside_reads_no_sources_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    feature = import_module("shibokensupport.feature")
    monkeypatch.setattr(feature, "_mod_uses_pyside", feature._mod_uses_pyside)
    read: list[object] = []
    monkeypatch.setattr(inspect, "getsource", read.append)
    skip_feature_search()
    feature.feature_imported(ModuleType("a_module_that_is_new"))
    assert read == []
    assert feature.pyside_feature_dict.pop("a_module_that_is_new") == -1


def test_what_was_asked_for_is_opened_after_the_picture(qtbot: QtBot, qapp: QApplication, tmp_path: Path) -> None:
    missing = tmp_path / "no such model.gguf"
    opening = open_window(qapp, tmp_path, StartOptions([missing]))
    with qtbot.waitSignal(opening.opened) as opened:
        opening.show()
    window: WindowObjects = opened.args[0]
    main = opening.frame.main
    told: list[Notice] = []
    window.desk.notices.given.connect(told.append)
    try:
        assert window.main is main
        qtbot.waitUntil(lambda: any(missing.name in notice.text for notice in told))
        QTest.keyClick(main, Qt.Key.Key_4, Qt.KeyboardModifier.ControlModifier)
        qtbot.waitUntil(lambda: window.library_presenter.page.is_shown)
        assert [action.text() for action in main.menuBar().actions()] == [menu.title() for menu in main.menus.values()]
        assert all(menu.actions() for menu in main.menus.values())
    finally:
        main.close()


def test_files_of_a_start_that_comes_before_the_window_is_whole_are_opened_in_it(
    qtbot: QtBot, qapp: QApplication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.paths.instance_name", lambda: f"layerdeck-test-{abs(hash(tmp_path))}")
    opening = open_window(qapp, tmp_path, StartOptions())
    serve_later_starts(qapp, opening)
    first = qapp.findChild(FirstInstance)
    assert first is not None
    second = subprocess.Popen(
        [sys.executable, "-c", SECOND, paths.instance_name(), str(tmp_path / "early.gguf")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    qtbot.waitUntil(lambda: second.poll() is not None)
    assert second.communicate()[0].strip() == b"True"
    told: list[Notice] = []

    def listen(window: WindowObjects) -> None:
        window.desk.notices.given.connect(told.append)

    opening.opened.connect(listen)
    with qtbot.waitSignal(opening.opened):
        opening.show()
    qtbot.waitUntil(lambda: any("early.gguf" in notice.text for notice in told))
    opening.frame.main.close()
    assert not first.is_listening, "files of later starts would be lost"
    first.setParent(None)
