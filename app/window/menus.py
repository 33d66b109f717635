"""What is in the menu bar: a function for each menu, given what its commands do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from PySide6.QtGui import QActionGroup, QKeySequence, QUndoGroup
from PySide6.QtWidgets import QWidget

from app.chats.shelf import ChatShelf
from app.language import LANGUAGE_NAMES, SYSTEM
from app.load.loader import Loader
from app.models.auto_layouts import STRATEGY_WORDS, AutoLayouts
from app.models.layouts import Layouts
from app.models.open_models import OpenModels
from app.models.opener import ModelOpener
from app.models.speeds import SpeedKeeper
from app.models.unloader import Unloader
from app.notices import Notices
from app.rig.calibrator import Calibrator
from app.rig.device_search import DeviceSearch, RepeatTest
from app.settings import Settings
from app.theme import THEME_NAMES, Theme, ThemeName
from app.window.actions import SEPARATOR, Actions, Command, MenuEntries, Switch
from app.window.arrangement import Arrangement
from app.window.chat.shelf_presenter import TransferPresenter
from app.window.questions import Questions
from engine.base.language import LANGUAGES, tr

_Key = QKeySequence.StandardKey
_Do = Callable[[], None]
Menu = tuple[str, MenuEntries]
"""A key of the window's `menus`, and entries."""


def file_menu(questions: Questions, opener: ModelOpener, window: QWidget) -> Menu:
    """Files of models, layouts and rigs."""
    return "File", (
        Command("open_model", tr("&Open Model…"), questions.open_model, _Key.Open),
        Command("open_demo", tr("Open &Demo Model"), opener.open_demo),
        Command(
            "open_again",
            tr("Open This Model A&gain"),
            opener.open_again,
            "Ctrl+Alt+O",
            tip=tr("The same file with another layout, beside the first: both can be loaded and asked"),
        ),
        SEPARATOR,
        Command("open_layout", tr("Open &Layout…"), questions.open_layout, "Ctrl+Shift+O"),
        Command("save_layout", tr("&Save Layout…"), questions.save_layout, _Key.Save),
        Command("open_rig", tr("Open &Rig…"), questions.open_rig),
        Command("save_rig", tr("Save R&ig…"), questions.save_rig),
        SEPARATOR,
        Command("quit", tr("&Quit"), lambda: _close(window), "Ctrl+Q"),
    )


def edit_menu(undo: QUndoGroup, copy_report: _Do) -> Menu:
    """Undo, and what is done to the texts of the current model."""
    return "Edit", (
        Command("undo", tr("&Undo"), undo.undo, _Key.Undo),
        Command("redo", tr("&Redo"), undo.redo, _Key.Redo),
        SEPARATOR,
        Command("copy_report", tr("&Copy Load Report"), copy_report, "Ctrl+Shift+C"),
    )


def layout_menu(layouts: Layouts, auto_layouts: AutoLayouts, show_auto_layout: _Do, toggle_pin: _Do) -> Menu:
    """Layouts that are found, and what they have to leave where it is."""
    strategies = (
        Command(
            f"auto_{words.name}",
            tr("Auto Layout: {title}", title=words.title),
            partial(auto_layouts.use, words.name),
            tip=words.purpose,
        )
        for words in STRATEGY_WORDS
    )
    return "Layout", (
        Command("propose", tr("&Propose a Layout"), layouts.propose, "Ctrl+I"),
        Command("split_evenly", tr("Split &Evenly over Devices"), layouts.split_evenly, "Ctrl+E"),
        SEPARATOR,
        *strategies,
        Command("auto_layout", tr("Automatic Layo&ut…"), show_auto_layout, "Ctrl+Shift+A"),
        Command("cancel_auto_layout", tr("Cancel the Searc&h for a Layout"), auto_layouts.cancel),
        SEPARATOR,
        Command("pin", tr("P&in or Release Selected Layers"), toggle_pin),
        Command("release_pins", tr("&Release All Layers"), auto_layouts.release_pins),
    )


def devices_menu(
    questions: Questions,
    *,
    search: DeviceSearch,
    unloader: Unloader,
    repeats: RepeatTest,
    speeds: SpeedKeeper,
    calibrator: Calibrator,
    show_kept_weights: Callable[[], None],
    show_packs: Callable[[], None],
    show_nearby: Callable[[], None],
) -> Menu:
    """Which devices there are, and what is measured of them."""
    return "Devices", (
        Command("refresh", tr("&Refresh"), search.refresh, _Key.Refresh),
        SEPARATOR,
        Command("start_lab", tr("Start &Lab Rig…"), questions.start_lab),
        Command("stop_lab", tr("&Stop Lab Rig"), unloader.stop_lab),
        SEPARATOR,
        Command("find_nearby", tr("Find Machines &Nearby…"), show_nearby),
        Command("add_remote", tr("Add Re&mote Worker…"), questions.add_remote),
        SEPARATOR,
        Command("test_repeats", tr("&Test Repeated Devices"), repeats.run),
        Command("measure_speeds", tr("Measure S&peeds"), speeds.measure),
        Command("reset_calibration", tr("Reset &Calibration"), calibrator.reset),
        SEPARATOR,
        Command("kept_weights", tr("&Weights Kept by Workers…"), show_kept_weights),
        Command(
            "packs", tr("&Engine Packs…"), show_packs, tip=tr("Backends for cards: installed, switched and removed")
        ),
    )


def model_menu(models: OpenModels, loader: Loader, unloader: Unloader, settings: Settings) -> Menu:
    """Loading and unloading, and what is done without being asked."""

    def stop_answer() -> None:
        models.current.loading.stop_answer()

    # Functions and no `partial(setattr, ...)`: PySide cannot see how many arguments a built-in takes, and passes none.
    def set_steps_back(wanted: bool) -> None:
        settings.steps_back = wanted

    def set_reload_lost(wanted: bool) -> None:
        settings.reload_lost = wanted

    return "Model", (
        Command("load", tr("&Load"), loader.load, "Ctrl+Return"),
        Command("cancel", tr("&Cancel Load"), loader.cancel, "Ctrl+."),
        Command("unload", tr("&Unload"), unloader.unload_current, "Ctrl+U"),
        SEPARATOR,
        Command("stop_answer", tr("&Stop Answer"), stop_answer, "Ctrl+Shift+."),
        SEPARATOR,
        Switch(
            "step_back",
            tr("Step &Back and Retry When Memory Runs Out"),
            settings.steps_back,
            set_steps_back,
            tip=tr("Try other layouts until one loads; the report says which"),
        ),
        Switch(
            "reload_lost",
            tr("&Reload a Lost Model by Itself"),
            settings.reload_lost,
            set_reload_lost,
        ),
        Command("ask_unload", tr("&Ask before Unloading a Model"), loader.ask_again),
    )


def chat_menu(
    shelf: ChatShelf,
    settings: Settings,
    transfer: TransferPresenter,
    *,
    toggle_list: _Do,
    search: _Do,
    delete: _Do,
    show_kept: _Do,
    show_prompt: _Do,
    show_beside: _Do,
) -> Menu:
    """Conversations."""
    return "Chat", (
        Command("new_chat", tr("&New Conversation"), shelf.new, _Key.New),
        Command("search_chats", tr("&Search Conversations"), search, "Ctrl+Shift+F"),
        Command("toggle_chat_list", tr("Show or Hide the &List"), toggle_list, "Ctrl+Shift+L"),
        Command("side_by_side", tr("&Two Models Side by Side"), show_beside, "Ctrl+Shift+B"),
        SEPARATOR,
        Switch(
            "drop_oldest_turns",
            tr("Leave Out the &Oldest Turns When the Context Is Full"),
            settings.drops_oldest_turns,
            shelf.drop_oldest_turns,
            tip=tr("They stay in the conversation; the model is not shown them any more"),
        ),
        Switch(
            "ask_when_full",
            tr("Ask be&fore Turns Are Left Out"),
            settings.asks_when_full,
            shelf.ask_when_full,
            tip=tr("Nothing is left out of a full context before you have said so"),
        ),
        Command(
            "kept_caches",
            tr("Saved &KV States…"),
            show_kept,
            tip=tr("KV states of conversations are saved on disk, so that models need not read them again"),
        ),
        SEPARATOR,
        Command("show_prompt", tr("Show What the &Model Reads…"), show_prompt, "Ctrl+Shift+P"),
        Command("export_chat", tr("&Export This Conversation…"), transfer.export_current),
        Command("export_all_chats", tr("Export &All Conversations…"), transfer.export_all),
        Command("import_chats", tr("&Import Conversations…"), transfer.import_file),
        SEPARATOR,
        Command("delete_chat", tr("&Delete This Conversation"), delete),
        Command("undo_delete_chat", tr("&Bring Back What Was Deleted"), shelf.undo_delete),
    )


def view_menu(
    theme: Theme,
    settings: Settings,
    notices: Notices,
    arrange: Callable[[Arrangement], None],
    reset_docks: _Do,
    show_library: _Do,
) -> Menu:
    """How the window looks."""

    def choose(name: ThemeName) -> None:
        settings.theme = name
        theme.set_name(name)

    return "View", (
        Command("arrange_place", tr("&Place Layers"), partial(arrange, Arrangement.PLACE), "Ctrl+1"),
        Command("arrange_both", tr("Layers and C&hat"), partial(arrange, Arrangement.BOTH), "Ctrl+2"),
        Command("arrange_chat", tr("&Chat Alone"), partial(arrange, Arrangement.CHAT), "Ctrl+3"),
        Command(
            "library", tr("&Library"), show_library, "Ctrl+4", tip=tr("All models of this computer, and how they fit")
        ),
        SEPARATOR,
        Command("theme_light", tr("L&ight"), lambda: choose("light")),
        Command("theme_dark", tr("&Dark"), lambda: choose("dark")),
        Command("theme_system", tr("As the &System"), lambda: choose("system")),
        SEPARATOR,
        *language_entries(settings, notices),
        SEPARATOR,
        Command("reset_docks", tr("&Reset Panels"), reset_docks),
    )


def language_entries(settings: Settings, notices: Notices) -> MenuEntries:
    """The languages, each by the name that it has for itself."""

    def choose(name: str) -> None:
        settings.language = name
        notices.say(tr("The language changes when Layerdeck is started again."))

    titles = {SYSTEM: tr("Lan&guage of the System"), **LANGUAGES}
    return tuple(Command(f"language_{name}", title, partial(choose, name)) for name, title in titles.items())


def check_language(actions: Actions, settings: Settings, window: QWidget) -> None:
    """Make the entries of the languages a choice of one, the chosen one checked."""
    _make_choice(actions, {f"language_{name}": name == settings.language for name in LANGUAGE_NAMES}, window)


def check_theme(actions: Actions, theme: Theme, window: QWidget) -> None:
    """Make the entries of the themes a choice of one, the present one chosen."""
    _make_choice(actions, {f"theme_{name}": name == theme.name for name in THEME_NAMES}, window)


def _make_choice(actions: Actions, checked: Mapping[str, bool], window: QWidget) -> None:
    group = QActionGroup(window)
    for name, is_checked in checked.items():
        action = actions[name]
        action.setCheckable(True)
        action.setChecked(is_checked)
        group.addAction(action)


def help_menu(show_handbook: _Do, show_keys: _Do, check_machine: _Do, open_log: _Do, show_about: _Do) -> Menu:
    """Where to look further."""
    return "Help", (
        Command("handbook", tr("&Handbook"), show_handbook, "F1", tip=tr("The page about what you are working with")),
        Command("keys", tr("&Keys"), show_keys, "Ctrl+F1"),
        Command(
            "check_machine",
            tr("&Check This Machine…"),
            check_machine,
            tip=tr("Devices, the engine on each of them, forecasts and speeds: a table, and a file to send"),
        ),
        Command("log", tr("Open the &Log Folder"), open_log),
        Command("about", tr("&About Layerdeck"), show_about),
    )


def _close(window: QWidget) -> None:
    window.close()
