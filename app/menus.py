"""What is in the menu bar."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from PySide6.QtGui import QKeySequence

from app.actions import SEPARATOR, Command, MenuEntries, Switch
from app.auto_layout_words import STRATEGY_WORDS
from engine.layout.layout import split_evenly

if TYPE_CHECKING:
    from app.main_window import MainWindow

_Key = QKeySequence.StandardKey


def make_menus(window: MainWindow) -> tuple[tuple[str, MenuEntries], ...]:
    """Return the menus of `window` by title."""
    return (
        ("&File", _file(window)),
        ("&Edit", _edit(window)),
        ("&Layout", _layout(window)),
        ("&Devices", _devices(window)),
        ("&Model", _model(window)),
        ("&View", _view(window)),
        ("&Help", _help(window)),
    )


def _file(window: MainWindow) -> MenuEntries:
    return (
        Command("open_model", "&Open Model…", window.open_model, _Key.Open),
        Command("open_demo", "Open &Demo Model", window.session.open_demo),
        SEPARATOR,
        Command("open_layout", "Open &Layout…", window.open_layout, "Ctrl+Shift+O"),
        Command("save_layout", "&Save Layout…", window.save_layout, _Key.Save),
        Command("open_rig", "Open &Rig…", window.open_rig),
        Command("save_rig", "Save R&ig…", window.save_rig),
        SEPARATOR,
        Command("quit", "&Quit", lambda: _close(window), "Ctrl+Q"),
    )


def _edit(window: MainWindow) -> MenuEntries:
    undo = window.session.document.undo_group
    return (
        Command("undo", "&Undo", undo.undo, _Key.Undo),
        Command("redo", "&Redo", undo.redo, _Key.Redo),
        SEPARATOR,
        Command("copy_report", "&Copy Load Report", window.copy_report, "Ctrl+Shift+C"),
        Command("clear_chat", "C&lear Chat", window.session.clear_conversation, "Ctrl+Shift+L"),
    )


def _layout(window: MainWindow) -> MenuEntries:
    def even() -> None:
        edit, rig = window.session.document.edit, window.session.rig.live.rig
        if edit is not None:
            devices = [device.id for device in rig.devices][: edit.layout.n_layers] or [rig.host.id]
            window.set_layout(split_evenly(edit.layout.n_layers, devices), "split evenly")

    return (
        Command("propose", "&Propose a Layout", window.session.use_initial_layout, "Ctrl+I"),
        Command("split_evenly", "Split &Evenly over Devices", even, "Ctrl+E"),
        SEPARATOR,
        *(
            Command(
                f"auto_{words.name}",
                f"Auto Layout: {words.title}",
                partial(window.session.auto_layouts.use, words.name),
                tip=words.purpose,
            )
            for words in STRATEGY_WORDS
        ),
        Command("auto_layout", "Automatic Layo&ut…", window.show_auto_layout, "Ctrl+Shift+A"),
        SEPARATOR,
        Command("pin", "P&in or Release Selected Layers", window.editor.toggle_pin),
        Command("release_pins", "&Release All Layers", window.session.auto_layouts.release_pins),
    )


def _devices(window: MainWindow) -> MenuEntries:
    rig = window.session.rig
    return (
        Command("refresh", "&Refresh", rig.search.refresh, _Key.Refresh),
        SEPARATOR,
        Command("start_lab", "Start &Lab Rig…", window.start_lab),
        Command("stop_lab", "&Stop Lab Rig", window.session.stop_lab),
        SEPARATOR,
        Command("add_remote", "Add Re&mote Worker…", window.add_remote),
        SEPARATOR,
        Command("test_repeats", "&Test Repeated Devices", rig.repeats.run),
        Command("measure_speeds", "Measure S&peeds", window.session.speeds.measure),
        Command("reset_calibration", "Reset &Calibration", window.session.calibrator.reset),
    )


def _model(window: MainWindow) -> MenuEntries:
    session = window.session
    return (
        Command("load", "&Load", session.loader.load, "Ctrl+Return"),
        Command("cancel", "&Cancel Load", session.loader.cancel, "Ctrl+."),
        Command("unload", "&Unload", session.unload, "Ctrl+U"),
        SEPARATOR,
        Command("stop_answer", "&Stop Answer", session.stop_answer, "Ctrl+Shift+."),
        SEPARATOR,
        Switch(
            "step_back",
            "Step &Back and Retry When Memory Runs Out",
            window.settings.steps_back,
            window.settings.step_back,
            tip="Try other layouts until one loads; the report says which",
        ),
        Switch(
            "reload_lost",
            "&Reload a Lost Model by Itself",
            window.settings.reload_lost,
            window.settings.reload_by_itself,
        ),
        Command("ask_unload", "&Ask before Unloading a Model", session.loader.ask_again),
    )


def _view(window: MainWindow) -> MenuEntries:
    return (
        Command("theme_light", "&Light", lambda: window.set_theme("light")),
        Command("theme_dark", "&Dark", lambda: window.set_theme("dark")),
        Command("theme_system", "As the &System", lambda: window.set_theme("system")),
        SEPARATOR,
        Command("reset_docks", "&Reset Panels", window.reset_docks),
    )


def _help(window: MainWindow) -> MenuEntries:
    return (
        Command("keys", "&Keys", window.show_keys, _Key.HelpContents),
        Command("log", "Open the &Log Folder", window.open_log),
        Command("about", "&About Layerdeck", window.show_about),
    )


def _close(window: MainWindow) -> None:
    window.close()
