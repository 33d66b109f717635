"""The window is painted before anything heavy is imported, and is whole afterwards, unless it was closed."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app import paths
from app.gui import serve_later_starts, skip_feature_search
from app.notices import Notice
from app.opening import Opening, Wishes
from app.settings import Settings
from app.single_instance import FirstInstance
from app.theme import Theme
from app.wiring import WindowParts
from tests.support.patience import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
NOT_BEFORE_THE_PICTURE = (
    "app.chats",
    "app.library",
    "app.load",
    "app.models",
    "app.rig",
    "app.wiring",
    "email",
    "engine.chat",
    "engine.machines.doctor",
    "engine.library.downloads",
    "engine.planning.fit",
    "engine.library.hub",
    "engine.library",
    "engine.runtime.process",
    "engine.machines.rigs",
    "engine.runtime.session.machine",
    "engine.runtime.session.snapshot",
    "http",
    "httpx",
    "llama_cpp",
    "markdown_it",
    "numpy",
    "psutil",
    "pygments",
    "pyqtgraph",
    "sqlite3",
    "urllib.request",
    "widgets.library.library_view",
    "widgets.markdown",
    "ziamath",
)
"""Packages and modules that take long to import, or that only what comes later needs."""
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
        print(*sys.modules)
        opening.picture.main.close()
first = FirstPaint()
application.installEventFilter(first)
import app.gui
from app.logs import start_logging
from app.notices import Notice
from app.opening import Opening, Wishes
from app.paths import log_path
from app.settings import Settings
from app.single_instance import hand_over
from app.theme import Theme
hand_over("nobody", [])
start_logging(log_path())
opening = Opening(Settings(), Theme(application, "dark"), Wishes())
opening.show()
application.exec()
print("app.wiring" in sys.modules)
"""


def open_window(qapp: QApplication, folder: Path, wishes: Wishes) -> Opening:
    return Opening(Settings(folder / "settings.ini"), Theme(qapp, "dark"), wishes)


def test_nothing_heavy_is_imported_before_the_first_paint() -> None:
    command = [sys.executable, "-c", PAINTED]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    modules, made_for_closed = run.stdout.splitlines()
    imported = modules.split()
    assert "app.window.main_window" in imported
    assert [heavy for heavy in NOT_BEFORE_THE_PICTURE if heavy in imported] == []
    assert made_for_closed == "False"


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
    opening = open_window(qapp, tmp_path, Wishes([missing]))
    with qtbot.waitSignal(opening.opened) as opened:
        opening.show()
    window: WindowParts = opened.args[0]
    main = opening.picture.main
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


def test_a_window_that_is_never_painted_is_made_whole_too(qtbot: QtBot, qapp: QApplication, tmp_path: Path) -> None:
    opening = open_window(qapp, tmp_path, Wishes())
    opening.picture.main.setAttribute(Qt.WidgetAttribute.WA_DontShowOnScreen)
    with qtbot.waitSignal(opening.opened) as opened:
        opening.show()
    opened.args[0].main.close()


def test_files_of_a_start_that_comes_before_the_window_is_whole_are_opened_in_it(
    qtbot: QtBot, qapp: QApplication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.paths.instance_name", lambda: f"layerdeck-test-{abs(hash(tmp_path))}")
    opening = open_window(qapp, tmp_path, Wishes())
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

    def listen(window: WindowParts) -> None:
        window.desk.notices.given.connect(told.append)

    opening.opened.connect(listen)
    with qtbot.waitSignal(opening.opened):
        opening.show()
    qtbot.waitUntil(lambda: any("early.gguf" in notice.text for notice in told))
    opening.picture.main.close()
    first.close()
    first.setParent(None)
