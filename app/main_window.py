"""The main window: puts the widgets together and connects them to the session."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QSize, Qt, QUrl
from PySide6.QtGui import QActionGroup, QCloseEvent, QDesktopServices, QDragEnterEvent, QDropEvent
from PySide6.QtWidgets import QDockWidget, QMainWindow, QMenu, QToolBar, QVBoxLayout, QWidget

from app import dialogs
from app.actions import Actions
from app.auto_layout_presenter import AutoLayoutPresenter
from app.bug_report import versions
from app.keys_dialog import KeysDialog
from app.loaded_presenter import LoadedPresenter
from app.menus import make_menus
from app.model_views import ModelViews
from app.notices import Notice
from app.paths import log_path
from app.presenter import Presenter
from app.rig_dialogs import ask_lab_caps, ask_remote_endpoint
from app.session import Session
from app.settings import Settings
from app.settings_presenter import SettingsPresenter
from app.status_line import StatusLine
from app.theme import THEME_NAMES, Theme, ThemeName
from engine.layout.layout import Layout
from widgets.chat.chat_pane import ChatPane
from widgets.common.palette import Palette
from widgets.controls.settings_bar import SettingsBar
from widgets.controls.share_editor import ShareEditor
from widgets.devices.device_strip import DeviceStrip
from widgets.layout_editor.editor import LayoutEditor
from widgets.layout_editor.keys import KEYS
from widgets.library.load_question import LoadQuestionBar
from widgets.library.model_panel import ModelPanel
from widgets.load_report.load_report import LoadReport

DOCK_STATE_VERSION = 1
ABOUT = "Layerdeck places the layers of a model on your devices, loads exactly that, and chats with the result."
DEFAULT_SIZE = (1440, 900)
ROOMY_HEIGHT = 860
MIN_REPORT_HEIGHT = 136
REPORT_SHARE = 0.27
"""Of the window's height, on roomy ones."""
SCREEN_ROOM = QSize(16, 40)
"""For the frame that the window manager adds."""


class MainWindow(QMainWindow):
    """One screen that tells the whole story: devices, model, layout, last load, chat."""

    def __init__(self, settings: Settings, theme: Theme) -> None:
        super().__init__()
        self.setWindowTitle("Layerdeck")
        self.setAcceptDrops(True)
        self.setDockNestingEnabled(True)
        self.settings = settings
        self.theme = theme
        self.session = Session(settings, self)
        self.settings_bar = SettingsBar()
        self.share_editor = ShareEditor()
        self.device_strip = DeviceStrip()
        self.editor = LayoutEditor()
        self.model_panel = ModelPanel()
        self.load_question = LoadQuestionBar()
        self.views = ModelViews(self)
        self.status_line = StatusLine()
        self.recent_menu = QMenu("Open Re&cent", self)
        self._closing = False
        self._place_widgets()
        self.views.follow_models()
        self.actions_by_name = Actions(self, make_menus(self))
        self._fill_view_menu()
        self._fill_file_menu()
        self.presenter = Presenter(self)
        LoadedPresenter(self)
        self.settings_presenter = SettingsPresenter(self)
        self.auto_layout_presenter = AutoLayoutPresenter(self)
        self._connect_dialogs()
        self.theme.palette_changed.connect(self._apply_palette)
        self._apply_palette(theme.palette)
        self._restore()

    def start(self, *, model: Path | None, rig: Path | None) -> None:
        """Look for devices and open what the command line names."""
        self.presenter.show_recent_models()
        self.session.rig.start(rig)
        if model is not None:
            self.session.open_model(model)

    # ------------------------------------------------------------------ structure

    def _place_widgets(self) -> None:
        central = QWidget()
        column = QVBoxLayout(central)
        column.setContentsMargins(8, 8, 8, 8)
        column.setSpacing(8)
        column.addWidget(self.device_strip)
        column.addWidget(self.load_question)
        column.addWidget(self.editor, stretch=1)
        column.addWidget(self.share_editor)
        self.setCentralWidget(central)
        bar = QToolBar("Settings")
        bar.setObjectName("settings")
        bar.setMovable(False)
        bar.toggleViewAction().setVisible(False)
        bar.addWidget(self.settings_bar)
        self.addToolBar(Qt.ToolBarArea.TopToolBarArea, bar)
        self.docks = {
            "models": self._dock("Models", "models", self.model_panel, Qt.DockWidgetArea.LeftDockWidgetArea),
            "report": self._dock("Last load", "report", self.views.reports, Qt.DockWidgetArea.BottomDockWidgetArea),
            "chat": self._dock("Chat", "chat", self.views.chats, Qt.DockWidgetArea.RightDockWidgetArea),
        }
        self.setCorner(Qt.Corner.BottomLeftCorner, Qt.DockWidgetArea.LeftDockWidgetArea)
        self.setCorner(Qt.Corner.BottomRightCorner, Qt.DockWidgetArea.RightDockWidgetArea)
        self.statusBar().addWidget(self.status_line, 1)
        self.statusBar().setSizeGripEnabled(False)

    def _dock(self, title: str, name: str, content: QWidget, area: Qt.DockWidgetArea) -> QDockWidget:
        dock = QDockWidget(title, self)
        dock.setObjectName(name)
        dock.setWidget(content)
        self.addDockWidget(area, dock)
        return dock

    def _fill_view_menu(self) -> None:
        menu = self.actions_by_name.menus["View"]
        first = menu.actions()[0]
        menu.insertActions(first, [dock.toggleViewAction() for dock in self.docks.values()])
        menu.insertSeparator(first)
        themes = QActionGroup(self)
        for name in THEME_NAMES:
            action = self.actions_by_name[f"theme_{name}"]
            action.setCheckable(True)
            action.setChecked(name == self.theme.name)
            themes.addAction(action)

    def _fill_file_menu(self) -> None:
        self.actions_by_name.menus["File"].insertMenu(self.actions_by_name["open_demo"], self.recent_menu)

    def _restore(self) -> None:
        self.resize(QSize(*DEFAULT_SIZE).boundedTo(self.screen().availableSize() - SCREEN_ROOM))
        saved = self.settings.window_state()
        if saved is not None and self.restoreGeometry(saved[0]) and self.restoreState(saved[1], DOCK_STATE_VERSION):
            return
        self.reset_docks()

    def reset_docks(self) -> None:
        """Put the docks where they were at first."""
        docks = self.docks
        for dock in docks.values():
            dock.setFloating(False)
            dock.show()
        self.addDockWidget(Qt.DockWidgetArea.LeftDockWidgetArea, docks["models"])
        self.addDockWidget(Qt.DockWidgetArea.BottomDockWidgetArea, docks["report"])
        self.addDockWidget(Qt.DockWidgetArea.RightDockWidgetArea, docks["chat"])
        roomy = self.height() >= ROOMY_HEIGHT
        report_height = round(self.height() * REPORT_SHARE) if roomy else MIN_REPORT_HEIGHT
        self.resizeDocks([docks["models"], docks["chat"]], [208, 360 if roomy else 280], Qt.Orientation.Horizontal)
        self.resizeDocks([docks["report"]], [report_height], Qt.Orientation.Vertical)

    def _apply_palette(self, palette: Palette) -> None:
        for widget in (
            self.device_strip,
            self.editor,
            self.model_panel,
            self.views,
        ):
            widget.apply_palette(palette)

    # ------------------------------------------------------------------ commands

    def open_model(self) -> None:
        recent = self.settings.recent_models
        path = dialogs.ask_open(self, "Open a model", dialogs.MODEL_FILTER, recent[0].path.parent if recent else None)
        if path is not None:
            self.session.open_model(path)

    def open_layout(self) -> None:
        path = dialogs.ask_open(self, "Open a layout", dialogs.LAYOUT_FILTER)
        if path is not None:
            self.session.open_layout(path)

    def save_layout(self) -> None:
        model = self.session.document.model
        if model is not None:
            path = dialogs.ask_save(
                self, "Save the layout", dialogs.LAYOUT_FILTER, f"{model.paths[0].stem}.layout.json"
            )
            if path is not None:
                self.session.save_layout(path)

    def open_rig(self) -> None:
        path = dialogs.ask_open(self, "Open a rig", dialogs.RIG_FILTER)
        if path is not None:
            self.session.rig.files.open(path)

    def save_rig(self) -> None:
        path = dialogs.ask_save(self, "Save the rig", dialogs.RIG_FILTER, "rig.json")
        if path is not None:
            self.session.rig.files.save(path)

    def add_remote(self) -> None:
        def remember() -> None:
            self.settings.remote_warning_given = True

        ask_remote_endpoint(
            self,
            warn=not self.settings.remote_warning_given,
            on_warned=remember,
            then=self.session.rig.search.add_remote,
        )

    def start_lab(self) -> None:
        ask_lab_caps(self, self.session.rig.lab.start)

    @property
    def chat(self) -> ChatPane:
        """The chat with the current model."""
        return self.views.current.chat

    @property
    def load_report(self) -> LoadReport:
        """The report on the current model's last load."""
        return self.views.current.report

    def copy_report(self) -> None:
        self.load_report.copy()

    def set_theme(self, name: ThemeName) -> None:
        self.settings.theme = name
        self.theme.set_name(name)

    def set_layout(self, layout: Layout, text: str) -> None:
        self.session.document.set_layout(layout, text)

    def show_auto_layout(self) -> None:
        self.auto_layout_presenter.show()

    def show_keys(self) -> None:
        KeysDialog(self, (("Layout editor", KEYS), ("Window", self.actions_by_name.shortcuts()))).open()

    def open_log(self) -> None:
        """Show the folder with the log: a file browser is everywhere, a program for .log files is not."""
        folder = log_path().parent
        if not QDesktopServices.openUrl(QUrl.fromLocalFile(str(folder))):
            self.status_line.show_notice(Notice(f"No file browser answered. The log is in {folder}", bad=False))

    def show_about(self) -> None:
        dialogs.show_text(self, "About Layerdeck", f"{ABOUT}\n\n{versions()}")

    # ------------------------------------------------------------------ status

    @property
    def status_text(self) -> str:
        return self.status_line.text()

    def _connect_dialogs(self) -> None:
        self.model_panel.open_requested.connect(self.open_model)
        self.device_strip.add_remote_requested.connect(self.add_remote)
        self.device_strip.add_lab_requested.connect(self.start_lab)

    # ------------------------------------------------------------------ events of Qt

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        """Take files."""
        if event.mimeData().hasUrls() and any(url.isLocalFile() for url in event.mimeData().urls()):
            event.acceptProposedAction()

    def dropEvent(self, event: QDropEvent) -> None:
        """Open a dropped model, layout or rig."""
        for url in event.mimeData().urls():
            if url.isLocalFile():
                event.acceptProposedAction()
                self.open_dropped(Path(url.toLocalFile()))
                return

    def open_dropped(self, path: Path) -> None:
        """Open `path` as what its name says: `.json` is a layout, anything else a model."""
        if path.suffix.lower() == ".json":
            self.session.open_layout(path)
        else:
            self.session.open_model(path)

    def closeEvent(self, event: QCloseEvent) -> None:
        """End every process before the window goes; closing twice does nothing more."""
        if not self._closing:
            self._closing = True
            self.settings.save_window_state(self.saveGeometry(), self.saveState(DOCK_STATE_VERSION))
            self.hide()
            self.session.close()
        event.accept()
