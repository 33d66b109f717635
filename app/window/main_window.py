"""The main window: puts the widgets in their places, and keeps where people put them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QAction, QCloseEvent, QDragEnterEvent, QDropEvent
from PySide6.QtWidgets import QDockWidget, QMainWindow, QMenu, QStackedWidget, QToolBar, QVBoxLayout, QWidget

from app.settings import Settings
from app.window.status_line import StatusLine
from engine.base.language import tr
from widgets.chat.chat_view import ChatView
from widgets.common.palette import Palette
from widgets.controls.settings_bar import SettingsBar
from widgets.controls.share_editor import ShareEditor
from widgets.devices.device_strip import DeviceStrip
from widgets.layout_editor.editor import LayoutEditor
from widgets.library.load_question import LoadQuestionBar
from widgets.library.model_panel import ModelPanel

MENUS = {
    "File": tr("&File"),
    "Edit": tr("&Edit"),
    "Layout": tr("&Layout"),
    "Devices": tr("&Devices"),
    "Model": tr("&Model"),
    "Chat": tr("&Chat"),
    "View": tr("&View"),
    "Help": tr("&Help"),
}
"""Titles of the menus, by the names that the program has for them."""
DOCK_STATE_VERSION = 1
SIDES = ("models", "chat")
"""Names of the panels at the left and the right."""
DEFAULT_SIZE = (1440, 900)
ROOMY_HEIGHT = 860
MIN_REPORT_HEIGHT = 136
EMPTY_REPORT_HEIGHT = 52
QWIDGETSIZE_MAX = (1 << 24) - 1
"""Qt's own, for no limit."""
REPORT_SHARE = 0.27
"""Of the window's height, on roomy ones."""
SCREEN_ROOM = QSize(16, 40)
"""For the frame that the window manager adds."""


class MainWindow(QMainWindow):
    """One screen that tells the whole story: devices, model, layout, last load, chat. It knows nothing of any."""

    files_dropped = Signal(object)  # tuple[Path, ...]
    saving = Signal()
    """Comes once, when everything is still there, for what is to be kept."""
    closing = Signal()
    """Comes once, when the window is hidden and before it is gone."""
    about_to_close = Signal()
    """Comes before that: the window is still as people see it."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.setWindowTitle("Layerdeck")
        self.setAcceptDrops(True)
        self.setDockNestingEnabled(True)
        self._settings = settings
        self.settings_bar = SettingsBar()
        self.share_editor = ShareEditor()
        self.device_strip = DeviceStrip()
        self.editor = LayoutEditor()
        self.model_panel = ModelPanel()
        self.load_question = LoadQuestionBar()
        self.chat_view = ChatView()
        self.chats = self.chat_view.panes
        self.reports = QStackedWidget()
        self.status_line = StatusLine()
        self.pages = QStackedWidget()
        """In the middle: the desk, and what takes its place for a while."""
        self.menus = {name: self.menuBar().addMenu(title) for name, title in MENUS.items()}
        """Still without entries, which come when there is somebody to do what they say."""
        self.recent_menu = QMenu(tr("Open Re&cent"), self)
        self._closing = False
        self._no_title = QWidget()
        """In place of the dock's title bar while there is nothing to tell it from."""
        self._place_widgets()

    # ------------------------------------------------------------------ structure

    def _place_widgets(self) -> None:
        desk = QWidget()
        column = self._column = QVBoxLayout(desk)
        column.setContentsMargins(8, 8, 8, 8)
        column.setSpacing(8)
        column.addWidget(self.device_strip)
        column.addWidget(self.load_question)
        column.addWidget(self.editor, stretch=1)
        column.addWidget(self.share_editor)
        self.pages.addWidget(desk)
        self.reports.setMaximumHeight(EMPTY_REPORT_HEIGHT)
        bar = QToolBar(tr("Settings"))
        bar.setObjectName("settings")
        bar.setMovable(False)
        bar.toggleViewAction().setVisible(False)
        bar.addWidget(self.settings_bar)
        self.addToolBar(Qt.ToolBarArea.TopToolBarArea, bar)
        # The Tab key goes the way in which widgets came: the bar, models, devices and layout, the rest.
        models = self._dock(tr("Models"), "models", self.model_panel, Qt.DockWidgetArea.LeftDockWidgetArea)
        self.setCentralWidget(self.pages)
        self.docks = {
            "models": models,
            "report": self._dock(tr("Last load"), "report", self.reports, Qt.DockWidgetArea.BottomDockWidgetArea),
            "chat": self._dock(tr("Chat"), "chat", self.chat_view, Qt.DockWidgetArea.RightDockWidgetArea),
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

    def complete_menus(self, *, before_demo: QAction) -> None:
        """Add what only the window knows: its docks to the View menu, and recent models to the File menu."""
        view = self.menus["View"]
        first = view.actions()[0]
        view.insertActions(first, [dock.toggleViewAction() for dock in self.docks.values()])
        view.insertSeparator(first)
        self.menus["File"].insertMenu(before_demo, self.recent_menu)

    def restore(self) -> None:
        """Take the size and the places that were saved, else the first ones."""
        self.resize(QSize(*DEFAULT_SIZE).boundedTo(self.screen().availableSize() - SCREEN_ROOM))
        saved = self._settings.window_state()
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
        self.resizeDocks([docks["models"], docks["chat"]], [208, 360 if roomy else 280], Qt.Orientation.Horizontal)
        self.resizeDocks([docks["report"]], [self._report_height], Qt.Orientation.Vertical)

    def open_report(self) -> None:
        """Give the report its room: there is something to say. Before the first load the editor has it."""
        if self.reports.maximumHeight() == EMPTY_REPORT_HEIGHT:
            self.reports.setMaximumHeight(QWIDGETSIZE_MAX)
            self.resizeDocks([self.docks["report"]], [self._report_height], Qt.Orientation.Vertical)

    @property
    def _report_height(self) -> int:
        return round(self.height() * REPORT_SHARE) if self.height() >= ROOMY_HEIGHT else MIN_REPORT_HEIGHT

    def side_widths(self) -> dict[str, int]:
        """Return how wide the panels at the sides are, where both are shown there."""
        sides = {name: self.docks[name] for name in SIDES}
        are_there = all(dock.isVisible() and not dock.isFloating() for dock in sides.values())
        return {name: dock.width() for name, dock in sides.items()} if are_there else {}

    def set_side_widths(self, widths: Mapping[str, int]) -> None:
        """Make the panels at the sides as wide again."""
        names = [name for name in widths if not self.docks[name].isHidden()]
        self.resizeDocks(
            [self.docks[name] for name in names], [widths[name] for name in names], Qt.Orientation.Horizontal
        )

    def show_chat_alone(self, alone: bool) -> None:
        """Give the chat the whole window, with the devices in one line above it; or give it back."""
        place = self.chat_view.above if alone else self._column
        for position, widget in enumerate((self.device_strip, self.load_question)):
            shown = not widget.isHidden()
            place.insertWidget(position, widget)
            widget.setVisible(shown)
        self.device_strip.set_line(alone)
        self.pages.setVisible(not alone)
        chat = self.docks["chat"]
        if alone:
            self.docks["models"].hide()
            self.docks["report"].hide()
            chat.setFloating(False)
            chat.show()
        chat.setTitleBarWidget(self._no_title if alone else None)  # type: ignore[arg-type]

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`."""
        for widget in (self.device_strip, self.editor, self.model_panel):
            widget.apply_palette(palette)

    # ------------------------------------------------------------------ events of Qt

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        """Take files."""
        if event.mimeData().hasUrls() and any(url.isLocalFile() for url in event.mimeData().urls()):
            event.acceptProposedAction()

    def dropEvent(self, event: QDropEvent) -> None:
        """Tell of the files that were dropped."""
        files = tuple(Path(url.toLocalFile()) for url in event.mimeData().urls() if url.isLocalFile())
        if files:
            event.acceptProposedAction()
            self.files_dropped.emit(files)

    def closeEvent(self, event: QCloseEvent) -> None:
        """End every process before the window goes; closing twice does nothing more."""
        if not self._closing:
            self._closing = True
            self.about_to_close.emit()
            self._settings.save_window_state(self.saveGeometry(), self.saveState(DOCK_STATE_VERSION))
            self.saving.emit()
            self.hide()
            self.closing.emit()
        event.accept()
