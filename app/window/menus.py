"""The entries of the menu bar: one function for each menu, which gets the callbacks of its commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from PySide6.QtGui import QActionGroup, QKeySequence, QUndoGroup
from PySide6.QtWidgets import QWidget

from app.chats.chat_controller import ChatController
from app.language import LANGUAGE_NAMES, SYSTEM
from app.load.loader import Loader
from app.models.auto_layouts import STRATEGY_TEXTS, AutoLayouts
from app.models.layouts import Layouts
from app.models.open_models import OpenModels
from app.models.opener import ModelOpener
from app.models.speeds import SpeedRepository
from app.models.unloader import Unloader
from app.notices import Notices
from app.rig.calibrator import Calibrator
from app.rig.device_search import DeviceSearch
from app.settings import Settings
from app.theme import DEFAULT_ZOOM, THEME_NAMES, Theme, ThemeName
from app.window.actions import SEPARATOR, Actions, Command, MenuEntries, Switch
from app.window.arrangement import Arrangement
from app.window.chat.conversation_list_presenter import TransferPresenter
from app.window.dialog_actions import DialogActions
from app.window.text_actions import text_commands
from engine.base.language import LANGUAGES, tr

_Key = QKeySequence.StandardKey
_Do = Callable[[], None]
Menu = tuple[str, MenuEntries]
"""A menu: its key in `MainWindow.menus`, and its entries."""


def file_menu(questions: DialogActions, opener: ModelOpener, window: QWidget) -> Menu:
    """Return the File menu: its commands open and save models, layouts and rigs."""
    return "File", (
        Command("open_model", tr("&Open Model…"), questions.open_model, _Key.Open),
        Command("open_demo", tr("Open &Demo Model"), opener.open_demo),
        Command(
            "open_again",
            tr("Open This Model A&gain"),
            opener.open_again,
            "Ctrl+Alt+O",
            tip=tr("Open the same file a second time, with a separate layout; both can be loaded at once"),
        ),
        SEPARATOR,
        Command("open_layout", tr("Open &Layout…"), questions.open_layout, "Ctrl+Shift+O"),
        Command("save_layout", tr("&Save Layout…"), questions.save_layout, _Key.Save),
        Command("open_rig", tr("Open &Rig…"), questions.open_rig),
        Command("save_rig", tr("Save R&ig…"), questions.save_rig),
        SEPARATOR,
        # Closes the window instead of calling `QApplication.quit`: `closeEvent` saves the state and ends all processes.
        # `StandardKey.Quit` has no key on Windows.
        Command("quit", tr("&Quit"), lambda: _close(window), "Ctrl+Q"),
    )


def edit_menu(undo: QUndoGroup, copy_report: _Do, show_preferences: _Do) -> Menu:
    """Return the Edit menu: undo, clipboard and preferences."""
    return "Edit", (
        Command("undo", tr("&Undo"), undo.undo, _Key.Undo),
        Command("redo", tr("&Redo"), undo.redo, _Key.Redo),
        SEPARATOR,
        *text_commands(),
        SEPARATOR,
        Command("copy_report", tr("Copy &Load Report"), copy_report, "Ctrl+Shift+C"),
        SEPARATOR,
        # `StandardKey.Preferences` has no key on Windows and on most Linux desktops.
        Command("preferences", tr("Pr&eferences…"), show_preferences, "Ctrl+,"),
    )


def layout_menu(
    layouts: Layouts,
    auto_layouts: AutoLayouts,
    show_auto_layout: _Do,
    toggle_pin: _Do,
    *,
    show_together: _Do,
    show_comparison: _Do,
    show_numbers: _Do,
    show_layouts: _Do,
    show_named: _Do,
    use_last: _Do,
    show_export: _Do,
    show_import: _Do,
) -> Menu:
    """Return the Layout menu: automatic layouts, pins, speed comparison, export and import.

    Each callback, such as `show_named`, carries out one menu entry.
    """
    strategies = (
        Command(
            f"auto_{words.name}",
            tr("Auto Layout: {title}", title=words.title),
            partial(auto_layouts.use, words.name),
            tip=words.purpose,
        )
        for words in STRATEGY_TEXTS
    )
    return "Layout", (
        Command("propose", tr("&Propose a Layout"), layouts.propose, "Ctrl+I"),
        Command(
            "use_last_layout",
            tr("Use &Last Layout"),
            use_last,
            tip=tr("Restore the last layout of this model"),
        ),
        Command(
            "named_layouts",
            tr("Named Layout&s…"),
            show_named,
            tip=tr("Save, use, rename, delete, import and export layouts of this model"),
        ),
        Command("split_evenly", tr("Split &Evenly over Devices"), layouts.split_evenly, "Ctrl+E"),
        SEPARATOR,
        *strategies,
        Command("auto_layout", tr("Automatic Layo&ut…"), show_auto_layout, "Ctrl+Shift+A"),
        Command(
            "plan_together",
            tr("Plan Se&veral Models…"),
            show_together,
            tip=tr("Find layouts for models that are to be loaded at the same time, and load them"),
        ),
        Command("cancel_auto_layout", tr("Cancel Layout Searc&h"), auto_layouts.cancel),
        SEPARATOR,
        Command(
            "numbers",
            tr("Place by &Numbers"),
            show_numbers,
            "Ctrl+L",
            tip=tr("Show fields for the layers and experts of each device, and a line for shares or llama.cpp options"),
        ),
        Command("pin", tr("P&in or Unpin Selected Layers"), toggle_pin),
        Command("release_pins", tr("Unpin All La&yers"), auto_layouts.release_pins),
        SEPARATOR,
        Command(
            "compare_layouts",
            tr("Compare T&wo Layouts…"),
            show_layouts,
            tip=tr("See two layouts of this model side by side: layers, memory, speed and data sent between devices"),
        ),
        Command(
            "compare_speed",
            tr("Compare Spee&d…"),
            show_comparison,
            tip=tr("Measure this layout and others alternately, and see which one is fastest"),
        ),
        SEPARATOR,
        Command(
            "export_layout",
            tr("Expo&rt…"),
            show_export,
            tip=tr("Show the command or file with which llama-server and other programs load the same layout"),
        ),
        Command(
            "import_layout",
            tr("I&mport…"),
            show_import,
            tip=tr("Make a layout from a llama-server command, a llama-swap entry or a Modelfile"),
        ),
    )


def devices_menu(
    questions: DialogActions,
    *,
    search: DeviceSearch,
    restart_lab: Callable[[], None],
    unloader: Unloader,
    speeds: SpeedRepository,
    calibrator: Calibrator,
    show_cached_weights: Callable[[], None],
    show_packs: Callable[[], None],
    show_nearby: Callable[[], None],
    show_lending: Callable[[], None],
    show_other_cards: Callable[[], None],
) -> Menu:
    """Return the Devices menu: search, lab rig, other machines, measurements and engine packs.

    Each callback, such as `show_packs`, carries out one menu entry.
    """
    return "Devices", (
        Command("refresh", tr("&Refresh"), search.refresh, _Key.Refresh),
        SEPARATOR,
        Command("start_lab", tr("Start &Lab Rig…"), questions.start_lab),
        Command(
            "split_numa",
            tr("Split CP&U by NUMA Node…"),
            questions.split_numa,
            tip=tr("Use each NUMA node, a part of the processor with its own memory, as a device"),
        ),
        Command("restart_lab", tr("Restart La&b Workers"), restart_lab),
        Command("stop_lab", tr("&Stop Lab Rig"), unloader.stop_lab),
        SEPARATOR,
        Command("find_nearby", tr("Find Computers &Nearby…"), show_nearby),
        Command("lend", tr("Len&d This Computer…"), show_lending),
        Command("add_remote", tr("Add Re&mote Worker…"), questions.add_remote),
        SEPARATOR,
        Command(
            "other_cards",
            tr("Plan with &Other Cards…"),
            show_other_cards,
            tip=tr("See how the model would run with graphics cards that this computer does not have"),
        ),
        Command("test_repeats", tr("&Test Devices with Two Groups of Layers"), search.test_repeats),
        Command("measure_speeds", tr("Measure S&peeds"), speeds.measure),
        Command("reset_calibration", tr("Reset &Calibration of Forecasts"), calibrator.reset),
        SEPARATOR,
        Command("kept_weights", tr("&Weights Cached by Workers…"), show_cached_weights),
        Command(
            "packs",
            tr("&Engine Packs…"),
            show_packs,
            tip=tr("Install, switch off or remove backends for graphics cards"),
        ),
    )


def model_menu(
    models: OpenModels,
    loader: Loader,
    unloader: Unloader,
    settings: Settings,
    *,
    show_load_settings: _Do,
    show_server: _Do,
) -> Menu:
    """Return the Model menu: load, unload, load settings, API server, and switches for automatic loads."""

    def stop_answer() -> None:
        models.current.conversation.answering.stop()

    # Functions and no `partial(setattr, ...)`: PySide cannot see how many arguments a built-in takes, and passes none.
    def set_steps_back(wanted: bool) -> None:
        settings.steps_back = wanted

    def set_reload_lost(wanted: bool) -> None:
        settings.reload_lost = wanted

    def set_serves_at_start(wanted: bool) -> None:
        settings.serves_at_start = wanted

    def set_load_last_model(wanted: bool) -> None:
        settings.loads_last_model = wanted

    return "Model", (
        Command("load", tr("&Load"), loader.load, "Ctrl+Return"),
        Command("cancel", tr("&Cancel Load"), loader.cancel, "Ctrl+."),
        Command("unload", tr("&Unload"), unloader.unload_current, "Ctrl+U"),
        Command(
            "park",
            tr("&Park"),
            unloader.park_current,
            "Ctrl+Alt+U",
            tip=tr("Unload the model and save its KV state; the next question loads it again"),
        ),
        SEPARATOR,
        Command(
            "load_settings",
            tr("Load Se&ttings…"),
            show_load_settings,
            "Ctrl+T",
            tip=tr("All settings of the next load, with the values in use"),
        ),
        SEPARATOR,
        Command("stop_answer", tr("&Stop Answer"), stop_answer, "Ctrl+Shift+."),
        SEPARATOR,
        Command(
            "serve",
            tr("API Ser&ver…"),
            show_server,
            "Ctrl+Shift+S",
            tip=tr("Let other programs use the models of this window through the OpenAI and Anthropic APIs"),
        ),
        Switch(
            "serve_at_start",
            tr("Start the API Server with the &Window"),
            settings.serves_at_start,
            set_serves_at_start,
        ),
        SEPARATOR,
        Switch(
            "step_back",
            tr("Retr&y with Another Layout When Memory Runs Out"),
            settings.steps_back,
            set_steps_back,
            tip=tr(
                "If a load runs out of memory, try other layouts until one loads; the load report names that layout"
            ),
        ),
        Switch(
            "reload_lost",
            tr("&Reload a Crashed Model Automatically"),
            settings.reload_lost,
            set_reload_lost,
        ),
        Switch(
            "load_last_model",
            tr("Load the Last &Model at Start"),
            settings.loads_last_model,
            set_load_last_model,
            tip=tr("Open and load the model that was used last, unless Layerdeck did not close properly"),
        ),
        Command("ask_unload", tr("&Ask before Unloading a Model"), loader.ask_again),
    )


def chat_menu(
    controller: ChatController,
    settings: Settings,
    transfer: TransferPresenter,
    *,
    toggle_list: _Do,
    search: _Do,
    find: _Do,
    delete: _Do,
    show_saved_states: _Do,
    show_prompt: _Do,
    show_side_chat: _Do,
) -> Menu:
    """Return the Chat menu: conversations, behaviour of a full context, export and import.

    Each callback, such as `show_prompt`, carries out one menu entry.
    """
    return "Chat", (
        Command("new_chat", tr("&New Conversation"), controller.new, _Key.New),
        Command("find_in_chat", tr("&Find in This Conversation…"), find, _Key.Find),
        Command("search_chats", tr("&Search Conversations"), search, "Ctrl+Shift+F"),
        Command("toggle_chat_list", tr("Show or Hide Conversation &List"), toggle_list, "Ctrl+Shift+L"),
        Command("side_by_side", tr("&Two Models Side by Side"), show_side_chat, "Ctrl+Shift+B"),
        SEPARATOR,
        Switch(
            "drop_oldest_turns",
            tr("Drop &Oldest Messages When Context Is Full"),
            settings.drops_oldest_turns,
            controller.drop_oldest_turns,
            tip=tr("The messages stay in the conversation, but the model no longer sees them"),
        ),
        Switch(
            "ask_when_full",
            tr("As&k before Messages Are Dropped"),
            settings.asks_when_full,
            controller.ask_when_full,
            tip=tr("Ask before old messages are hidden from the model"),
        ),
        Command(
            "saved_kv_states",
            tr("Saved K&V States…"),
            show_saved_states,
            tip=tr("Limit or remove saved KV states. With a saved state a model need not process a conversation again"),
        ),
        SEPARATOR,
        Command("show_prompt", tr("Show Raw Pro&mpt…"), show_prompt, "Ctrl+Shift+P"),
        Command("export_chat", tr("&Export This Conversation…"), transfer.export_current),
        Command("export_all_chats", tr("Export &All Conversations…"), transfer.export_all),
        Command("import_chats", tr("&Import Conversations…"), transfer.import_file),
        SEPARATOR,
        Command("delete_chat", tr("&Delete This Conversation"), delete),
        Command("undo_delete_chat", tr("&Restore Last Deleted"), controller.undo_delete),
    )


def view_menu(
    theme: Theme,
    settings: Settings,
    notices: Notices,
    layouts: AutoLayouts,
    arrange: Callable[[Arrangement], None],
    reset_docks: _Do,
    show_library: _Do,
    show_palette: _Do,
    show_on_top: Callable[[bool], None],
) -> Menu:
    """Return the View menu: command palette, arrangements, library, zoom, theme and language.

    Each callback, such as `show_library`, carries out one menu entry.
    """

    def choose(name: ThemeName) -> None:
        settings.theme = name
        theme.set_name(name)

    def zoom_to(percent: int) -> None:
        settings.zoom_percent = percent
        theme.set_zoom(percent)
        notices.show(tr("Zoom: {percent} %", percent=percent))

    return "View", (
        Command(
            "command_palette",
            tr("Comm&and Palette…"),
            show_palette,
            "Ctrl+K",
            tip=tr("Search all commands, models and saved layouts"),
        ),
        SEPARATOR,
        Command("arrange_place", tr("La&yers Only"), partial(arrange, Arrangement.PLACE), "Ctrl+1"),
        Command("arrange_both", tr("Layers and C&hat"), partial(arrange, Arrangement.BOTH), "Ctrl+2"),
        Command("arrange_chat", tr("&Chat Only"), partial(arrange, Arrangement.CHAT), "Ctrl+3"),
        Command(
            "library",
            tr("&Library"),
            show_library,
            "Ctrl+4",
            tip=tr("Show all models on this computer, and whether they fit"),
        ),
        Switch(
            "count_projectors",
            tr("Count &Projectors in Forecasts"),
            layouts.counts_projectors,
            layouts.count_projectors,
            tip=tr(
                "Include the memory of a model's projector (for images and sound) in the forecasts of Library and Find"
            ),
        ),
        Switch(
            "devices_on_top",
            tr("Devices on Top of Other &Windows"),
            False,
            show_on_top,
            tip=tr("Show the memory of all devices in a small window that stays on top"),
        ),
        SEPARATOR,
        Command("zoom_in", tr("&Zoom In"), lambda: zoom_to(theme.next_zoom(1)), "Ctrl++", other_shortcut="Ctrl+="),
        Command("zoom_out", tr("Zoom &Out"), lambda: zoom_to(theme.next_zoom(-1)), "Ctrl+-"),
        Command("zoom_reset", tr("&Normal Size"), lambda: zoom_to(DEFAULT_ZOOM), "Ctrl+0"),
        SEPARATOR,
        Command("theme_light", tr("L&ight"), lambda: choose("light")),
        Command("theme_dark", tr("&Dark"), lambda: choose("dark")),
        Command("theme_system", tr("Follow &System"), lambda: choose("system")),
        SEPARATOR,
        *language_entries(settings, notices),
        SEPARATOR,
        Command("reset_docks", tr("&Reset Panels"), reset_docks),
    )


def language_entries(settings: Settings, notices: Notices) -> MenuEntries:
    """Return a menu entry for each language, with its name in that language."""

    def choose(name: str) -> None:
        settings.language = name
        # Texts at module level are translated when their module is imported.
        notices.show(tr("The language changes at the next start of Layerdeck."))

    titles = {SYSTEM: tr("System Lan&guage"), **LANGUAGES}
    return tuple(Command(f"language_{name}", title, partial(choose, name)) for name, title in titles.items())


def check_language(actions: Actions, settings: Settings, window: QWidget) -> None:
    """Make the language entries of the menu exclusive, and check the current one."""
    _make_choice(actions, {f"language_{name}": name == settings.language for name in LANGUAGE_NAMES}, window)


def check_theme(actions: Actions, theme: Theme, window: QWidget) -> None:
    """Make the theme entries of the menu exclusive, and check the current one."""
    _make_choice(actions, {f"theme_{name}": name == theme.name for name in THEME_NAMES}, window)


def _make_choice(actions: Actions, checked: Mapping[str, bool], window: QWidget) -> None:
    # Exclusive by default. The window, its parent, keeps it alive.
    group = QActionGroup(window)
    for name, is_checked in checked.items():
        action = actions[name]
        action.setCheckable(True)
        action.setChecked(is_checked)
        group.addAction(action)


def help_menu(show_handbook: _Do, show_keys: _Do, check_machine: _Do, open_log: _Do, show_about: _Do) -> Menu:
    """Return the Help menu: handbook, keys, check of this computer, log folder and About.

    Each argument carries out one menu entry.
    """
    return "Help", (
        Command(
            "handbook",
            tr("&Handbook"),
            show_handbook,
            "F1",
            tip=tr("Open the page about the part of the window that you are using"),
        ),
        Command("keys", tr("&Keyboard Shortcuts"), show_keys, "Ctrl+F1"),
        Command(
            "check_machine",
            tr("&Check This Computer…"),
            check_machine,
            tip=tr("Test devices, the engine on each of them, forecasts and speeds; the report can be saved"),
        ),
        Command("log", tr("Open the &Log Folder"), open_log),
        Command("about", tr("&About Layerdeck"), show_about),
    )


def _close(window: QWidget) -> None:
    window.close()
