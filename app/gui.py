"""Entry point of the window.

`layerdeck [--theme light|dark|system] [--language system|en|de|FILE.po] [--rig FILE] [--new-window] [FILE.gguf ...]`
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from app.surroundings import repair_home
from engine.base.errors import ArgumentError, NoDisplayError

if TYPE_CHECKING:
    from PySide6.QtWidgets import QApplication

    from app.opening import Opening
    from app.wiring import WindowObjects

NO_DISPLAY = "There is no display to open a window on. Start it from a desktop session, or use layerdeck-cli."
# As `app.cli.exit_codes.ARGUMENT`.
EXIT_ARGUMENT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Open the window, run Qt's event loop until the window closes, and return the exit code."""
    options = _parse(arguments)
    if aside := repair_home(os.environ):
        sys.stderr.write(f"layerdeck: {aside}\n")
    try:
        check_display()
    except NoDisplayError as error:
        sys.stderr.write(f"layerdeck: {error.summary()}\n")
        return EXIT_ARGUMENT
    return _run(options)


def skip_feature_search() -> None:
    """Prevent PySide from reading the source of each module that is imported after this call.

    PySide searches the source for `from __feature__ import`, which nothing here uses. The search took a fifth of the
    processor time of imports before the first paint, and a tenth of later imports (PySide6 6.11.3). The PySide
    function that is replaced is private: if it is missing, nothing is changed.
    """
    with suppress(ImportError):
        feature = import_module("shibokensupport.feature")
        if hasattr(feature, "_mod_uses_pyside"):
            setattr(feature, "_mod_uses_pyside", lambda _module: False)  # noqa: B010 (mypy knows no such attribute)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="layerdeck", description="Place the layers of a GGUF model on your devices, load exactly that, and chat."
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.gguf", help="models to open, or a layout")
    parser.add_argument("--theme", choices=("light", "dark", "system"))
    parser.add_argument(
        "--language", metavar="NAME", help="en, de or system, or the path of a translation in progress (FILE.po)"
    )
    parser.add_argument("--new-window", action="store_true", help="do not pass the files to an open window")
    parser.add_argument("--rig", type=Path, metavar="FILE", help="use the devices of this rig file")
    return parser.parse_args(arguments)


def check_display() -> None:
    """Raise `NoDisplayError` if there is no display. Qt itself would abort the process."""
    if not sys.platform.startswith("linux"):
        return
    platform = os.environ.get("QT_QPA_PLATFORM", "")
    # Qt's other platforms, such as `offscreen`, need no X server.
    if platform and not platform.startswith("xcb"):
        return
    # Qt chooses Wayland by itself if there is one.
    if os.environ.get("WAYLAND_DISPLAY") and not platform:
        return
    if not os.environ.get("DISPLAY") or not _has_x_server():
        raise NoDisplayError(NO_DISPLAY)


def _has_x_server() -> bool:
    name = ctypes.util.find_library("xcb")
    if name is None:
        return True
    # By hand and before Qt: a failed connection makes Qt abort the process.
    xcb = ctypes.CDLL(name)
    # Without this ctypes would cut the pointer to 32 bits.
    xcb.xcb_connect.restype = ctypes.c_void_p
    xcb.xcb_connect.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    xcb.xcb_connection_has_error.argtypes = [ctypes.c_void_p]
    xcb.xcb_disconnect.argtypes = [ctypes.c_void_p]
    connection = xcb.xcb_connect(None, None)
    # `xcb_connect` never returns NULL. Even a failed connection has to be asked, and freed.
    broken = bool(xcb.xcb_connection_has_error(connection))
    xcb.xcb_disconnect(connection)
    return not broken


def _run(options: argparse.Namespace) -> int:
    from PySide6.QtWidgets import QApplication

    from app.allocator import limit_malloc
    from app.garbage import GarbageCollector
    from app.language import find_language, kept_choice, speak

    # Before Qt starts threads: each may get an arena of its own.
    limit_malloc()
    application = QApplication(sys.argv[:1])
    collector = GarbageCollector(application)
    skip_feature_search()
    try:
        # Before modules with tables of texts are imported: `tr` at module level uses the language of that moment.
        speak(application, find_language(options.language or kept_choice()))
    except ArgumentError as error:
        sys.stderr.write(f"layerdeck: {error.summary()}\n")
        return EXIT_ARGUMENT
    from app.bug_report import BugReporter
    from app.logs import start_logging
    from app.opening import Opening, StartOptions
    from app.packs import use_packs
    from app.paths import APPLICATION, instance_name, log_path
    from app.settings import Settings
    from app.single_instance import hand_over
    from app.theme import Theme

    application.setApplicationName(APPLICATION)
    application.setApplicationDisplayName("Layerdeck")
    application.setDesktopFileName(APPLICATION)
    # A window with a rig file is not shared: its devices may be imaginary.
    is_only = not options.new_window and options.rig is None
    if is_only and hand_over(instance_name(), options.files):
        return 0

    start_logging(log_path())
    use_packs()
    reporter = BugReporter(application)
    reporter.install()
    settings = Settings()
    theme = Theme(application, options.theme or settings.theme, settings.zoom_percent)
    opening = Opening(settings, theme, StartOptions(options.files, options.rig))
    reporter.window = opening.frame.main
    signals = QuitOnSignals(application)
    opening.opened.connect(lambda _: collector.begin())
    opening.opened.connect(partial(_keep_run_record, application))
    opening.opened.connect(partial(_show_icon, application))
    if is_only:
        serve_later_starts(application, opening)
    opening.show()
    code = application.exec()
    signals.close()
    logging.shutdown()
    return code


def _keep_run_record(application: QApplication, window: WindowObjects) -> None:
    from app.paths import run_records_path
    from app.run_records import RunRecords

    marks = RunRecords(run_records_path())
    window.follow_run(marks)
    # Not earlier: a crash while the window closes leaves the mark.
    application.aboutToQuit.connect(marks.end)


def _show_icon(application: QApplication, _window: WindowObjects) -> None:
    """Set the window icon, for systems on which our menu entry is not installed.

    Called after the first paint, because drawing all sizes of the icon takes time.
    """
    from PySide6.QtGui import QIcon

    from resources.loader import folder

    application.setWindowIcon(QIcon(str(folder() / "layerdeck.svg")))


def serve_later_starts(application: QApplication, opening: Opening) -> None:
    """From now on, open the files that later starts of the program pass to this process, which has the window.

    Files that arrive before the window is complete are opened as soon as it is.
    """
    from app.paths import instance_name
    from app.single_instance import FirstInstance, OpenEvents

    first = FirstInstance(instance_name(), application)
    early: list[list[Path]] = []
    sources: list[FirstInstance | OpenEvents] = [first]
    if sys.platform == "darwin":
        sources.append(OpenEvents(application))
    for source in sources:
        source.asked.connect(early.append)

    def serve(window: WindowObjects) -> None:
        for source in sources:
            source.asked.disconnect()
            source.asked.connect(partial(window.open_files))
        for files in early:
            window.open_files(files)

    opening.opened.connect(serve)
    # Not only at the end of the process: files that arrive at a closed window are lost.
    opening.frame.main.about_to_close.connect(first.close)
    application.aboutToQuit.connect(first.close)


class QuitOnSignals:
    """Closes the window on SIGINT, SIGTERM and SIGHUP.

    Python runs signal handlers only between bytecodes, so not while Qt's event loop waits. But its C handler writes a
    byte to the wake-up socket immediately, and a `QSocketNotifier` of that socket wakes the event loop.
    """

    def __init__(self, application: QApplication) -> None:
        from PySide6.QtCore import QSocketNotifier

        self._application = application
        self._reader, self._writer = socket.socketpair()
        # `set_wakeup_fd` refuses a blocking socket.
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        # A full buffer is no loss: one byte wakes the event loop.
        self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # Without a handler in Python there is no C handler that writes the byte.
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), self._on_signal)
        self._notifier = QSocketNotifier(self._reader.fileno(), QSocketNotifier.Type.Read)
        self._notifier.activated.connect(self._on_readable)

    def close(self) -> None:
        self._notifier.setEnabled(False)
        signal.set_wakeup_fd(self._before)
        self._reader.close()
        self._writer.close()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Do nothing: Python's C handler has already written the byte to the wake-up socket."""

    def _on_readable(self) -> None:
        self._reader.recv(4096)
        # Before `quit`: `closeEvent` saves the state and ends all processes.
        self._application.closeAllWindows()
        self._application.quit()


if __name__ == "__main__":
    sys.exit(main())
