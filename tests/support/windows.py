"""Opens windows of the program in the process of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from PySide6.QtCore import QCoreApplication, QEvent
from pytestqt.qtbot import QtBot

if TYPE_CHECKING:
    from PySide6.QtWidgets import QApplication

    from app.wiring import WindowObjects


class WindowOpener:
    """Opens windows with their settings in `folder`. They are shown at once, and closed at the end of the test."""

    def __init__(self, stack: ExitStack, qtbot: QtBot, qapp: QApplication, folder: Path) -> None:
        self._stack, self._qtbot, self._qapp, self._folder = stack, qtbot, qapp, folder

    def __call__(self, theme: Literal["dark", "light"] = "dark") -> WindowObjects:
        """Open and return a window."""
        # Imported here: tests of the command line share the fixtures, and need nothing of the window.
        from app.settings import Settings
        from app.theme import Theme
        from app.wiring import make_window

        window = make_window(Settings(self._folder / "settings.ini"), Theme(self._qapp, theme))
        # pytest-qt has called `deleteLater`. The window is deleted now, while Python still holds its parts: the garbage
        # collector would take them apart while Qt still delivers events to them.
        self._stack.callback(QCoreApplication.sendPostedEvents, window.main, QEvent.Type.DeferredDelete)
        self._stack.callback(window.main.close)
        self._qtbot.addWidget(window.main)
        window.main.show()
        return window


@contextmanager
def window_opener(qtbot: QtBot, qapp: QApplication, folder: Path) -> Iterator[WindowOpener]:
    """Yield a function that opens windows; all are closed at the end of the context.

    The windows have a data folder of their own. Otherwise equal models of two tests would share notes, layouts and
    conversations.
    """
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder / "xdg_data_home"))
        yield WindowOpener(stack, qtbot, qapp, folder)


def open_with_model(open_window: WindowOpener, qtbot: QtBot, folder: Path) -> WindowObjects:
    """Open a window with the rig `rig.json` and the model `m.gguf` of `folder`."""
    opened = open_window()
    with qtbot.waitSignal(opened.desk.rig.live.rig_changed):
        opened.desk.rig.files.open(folder / "rig.json")
    with qtbot.waitSignal(opened.desk.opener.model_changed):
        opened.desk.opener.open(folder / "m.gguf")
    return opened
