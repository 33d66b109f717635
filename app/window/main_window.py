"""The main window: it places the widgets, and stores and restores its size and panels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from PySide6.QtCore import QEvent, QObject, QSize, Qt, Signal
from PySide6.QtGui import QAction, QCloseEvent, QDragEnterEvent, QDropEvent, QResizeEvent
from PySide6.QtWidgets import QDockWidget, QMainWindow, QMenu, QStackedWidget, QToolBar, QWidget

from app.settings import Settings
from app.window.status_line import StatusLine
from engine.base.language import tr
from widgets.chat.chat_view import ChatView
from widgets.common.boxes import v_box
from widgets.common.palette import Palette
from widgets.controls.settings_bar import SettingsBar
from widgets.controls.share_editor import ShareEditor
from widgets.devices.device_strip import DeviceStrip
from widgets.layout_editor.editor import LayoutEditor
from widgets.library.load_question import LoadQuestion, LoadQuestionBar
from widgets.library.model_panel import ModelPanel
from widgets.library.unload_offer import UnloadOfferBar

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
"""Titles of the menus. The keys are the names of the menus in `MainWindow.menus`."""
DOCK_STATE_VERSION = 1
SIDES = ("models", "chat")
"""Names of the docks at the left and right side."""
DEFAULT_SIZE = (1440, 900)
ROOMY_HEIGHT = 860
LOW_HEIGHT = 620
"""Window height in pixels. A lower window hides the device graphs, so that the lanes of layers get the space."""
MIN_REPORT_HEIGHT = 136
SHORT_REPORT_HEIGHT = 104
EMPTY_REPORT_HEIGHT = 52
_SAME_HEIGHT = 4
"""Pixels: dock heights that differ by no more than this count as equal, because Qt rounds heights."""
PROPOSALS_REPORT_HEIGHT = 200
"""Height in pixels at which the load report shows the sentence of a failed load and its first proposals."""
QWIDGETSIZE_MAX = (1 << 24) - 1
"""Largest width or height of a widget, as in Qt's macro of this name; PySide does not export it."""
REPORT_SHARE = 0.27
"""Height of the load report as share of the window's height, if the window is at least `ROOMY_HEIGHT` high."""
BOTH_WIDTH = 1600
"""Least width of the window in pixels for load report and API server panel side by side."""
SERVER_SHARE = 0.3
LEAST_SERVER_HEIGHT = 236
"""Least height of the opened API server panel in pixels. In a high window it has `SERVER_SHARE` of the height."""
SCREEN_ROOM = QSize(16, 40)
"""Width and height in pixels that the window leaves free on its screen, for the frame of the window manager."""
MIN_SIZE = QSize(800, 480)
"""Smallest size of the window. It fits a screen of 1280x800 at a scale of 150 %, with frame and task bar."""


class MainWindow(QMainWindow):
    """Shows devices, models, layout, load report and chat. It contains only widgets; presenters fill them.

    When it closes, it emits `about_to_close`, `saving` and `closing`, in this order and once each.
    """

    files_dropped = Signal(object)  # tuple[Path, ...]
    saving = Signal()
    """Emitted when the window closes, while all objects still exist, so that they store their state."""
    closing = Signal()
    """Emitted last when the window closes: it is hidden, and all processes must end now."""
    about_to_close = Signal()
    """Emitted first when the window closes, while it is still visible."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.setWindowTitle("Layerdeck")
        self.setAcceptDrops(True)
        self.setDockNestingEnabled(True)
        # Without a minimum of its own, Qt makes the window as large as its content needs at any moment: it would grow
        # when a progress bar or a second chat appears, beyond the screen if need be.
        self.setMinimumSize(MIN_SIZE)
        self._settings = settings
        self.settings_bar = SettingsBar()
        self.share_editor = ShareEditor()
        self.device_strip = DeviceStrip()
        self.editor = LayoutEditor()
        self.model_panel = ModelPanel()
        self.load_question = LoadQuestionBar()
        self.unload_offer = UnloadOfferBar()
        self.chat_view = ChatView()
        self.chats = self.chat_view.panes
        self.reports = QStackedWidget()
        self.status_line = StatusLine()
        self.pages = QStackedWidget()
        """The pages in the middle of the window: devices with layout editor, library and others; one is shown."""
        self.menus = {name: self.menuBar().addMenu(title) for name, title in MENUS.items()}
        """The menus by their names in the code; `Actions` adds their entries."""
        self.recent_menu = QMenu(tr("Open Re&cent"), self)
        self._closing = False
        self._has_question = False
        self._settled_height = 0
        """Last height that `settle_report` gave the load report; 0 before the first one."""
        self._report_gives_way = False
        """Whether the load report is hidden for the API server panel, and comes back when that panel is closed."""
        self._no_title = QWidget()
        """An empty widget that takes the place of the chat dock's title bar while no other dock is shown."""
        self._place_widgets()

    # ------------------------------------------------------------------ structure

    def _place_widgets(self) -> None:
        desk = QWidget()
        column = self._column = v_box(desk, spacing=8, margins=(8, 8, 8, 8))
        column.addWidget(self.device_strip)
        column.addWidget(self.load_question)
        column.addWidget(self.unload_offer)
        column.addWidget(self.editor, stretch=1)
        column.addWidget(self.share_editor)
        self.pages.addWidget(desk)
        self.reports.setMaximumHeight(EMPTY_REPORT_HEIGHT)
        bar = QToolBar(tr("Settings"))
        bar.setObjectName("settings")
        bar.setMovable(False)
        # Without an entry in the context menu of tool bars: no other menu could show a hidden bar again.
        bar.toggleViewAction().setVisible(False)
        bar.addWidget(self.settings_bar)
        self.addToolBar(Qt.ToolBarArea.TopToolBarArea, bar)
        # Tab goes through widgets in the order in which they are added: the bar, models, devices and layout, the rest.
        models = self._dock(tr("Models"), "models", self.model_panel, Qt.DockWidgetArea.LeftDockWidgetArea)
        self.setCentralWidget(self.pages)
        self.docks = {
            "models": models,
            "report": self._dock(tr("Last load"), "report", self.reports, Qt.DockWidgetArea.BottomDockWidgetArea),
            "chat": self._dock(tr("Chat"), "chat", self.chat_view, Qt.DockWidgetArea.RightDockWidgetArea),
        }
        # Last, so that Tab reaches it last. Its content is made when it is shown first (`ServePresenter`).
        self.serve_dock = self._dock(tr("API server"), "serve", QWidget(), Qt.DockWidgetArea.BottomDockWidgetArea)
        self.serve_dock.hide()
        self.serve_dock.installEventFilter(self)
        # The side panels get the corners: the report lies between them.
        self.setCorner(Qt.Corner.BottomLeftCorner, Qt.DockWidgetArea.LeftDockWidgetArea)
        self.setCorner(Qt.Corner.BottomRightCorner, Qt.DockWidgetArea.RightDockWidgetArea)
        self.statusBar().addWidget(self.status_line, 1)
        self.statusBar().setSizeGripEnabled(False)

    def _dock(self, title: str, name: str, content: QWidget, area: Qt.DockWidgetArea) -> QDockWidget:
        dock = QDockWidget(title, self)
        # `saveState` and `restoreState` identify docks by these names.
        dock.setObjectName(name)
        dock.setWidget(content)
        self.addDockWidget(area, dock)
        return dock

    def complete_menus(self, *, before_demo: QAction) -> None:
        """Add entries that show or hide the docks to the View menu, and the menu of recent models to the File menu.

        `before_demo`: entry of the File menu before which the recent models are inserted.
        """
        view = self.menus["View"]
        first = view.actions()[0]
        view.insertActions(first, [dock.toggleViewAction() for dock in (*self.docks.values(), self.serve_dock)])
        view.insertSeparator(first)
        self.menus["File"].insertMenu(before_demo, self.recent_menu)

    def restore(self) -> None:
        """Restore the stored size and panels, or use defaults. The window is never larger than its screen."""
        # First: this size stays if no geometry was saved.
        self.resize(QSize(*DEFAULT_SIZE).boundedTo(self.screen().availableSize() - SCREEN_ROOM))
        saved = self._settings.window_state()
        if saved is None or not self.restoreGeometry(saved[0]) or not self.restoreState(saved[1], DOCK_STATE_VERSION):
            self.reset_docks()
        self._report_gives_way = not self.serve_dock.isHidden() and self.docks["report"].isHidden()
        self._fit_screen()

    def _fit_screen(self) -> None:
        """Shrink the window and move it into its screen, if it was stored at another scale or on another screen."""
        free = self.screen().availableGeometry()
        size = self.size().boundedTo(free.size() - SCREEN_ROOM)
        if size == self.size():
            return
        # A maximised window ignores `resize`.
        self.setWindowState(self.windowState() & ~Qt.WindowState.WindowMaximized)
        self.resize(size)
        right, bottom = free.right() - size.width(), free.bottom() - size.height()
        self.move(max(min(self.x(), right), free.left()), max(min(self.y(), bottom), free.top()))

    def reset_docks(self) -> None:
        """Reset the docks to their default places and sizes."""
        docks = self.docks
        for dock in docks.values():
            dock.setFloating(False)
            dock.show()
        self.addDockWidget(Qt.DockWidgetArea.LeftDockWidgetArea, docks["models"])
        self.addDockWidget(Qt.DockWidgetArea.BottomDockWidgetArea, docks["report"])
        self.addDockWidget(Qt.DockWidgetArea.RightDockWidgetArea, docks["chat"])
        self.serve_dock.setFloating(False)
        self.serve_dock.hide()
        self.splitDockWidget(docks["report"], self.serve_dock, Qt.Orientation.Horizontal)
        self._report_gives_way = False
        roomy = self.height() >= ROOMY_HEIGHT
        self.resizeDocks([docks["models"], docks["chat"]], [208, 360 if roomy else 280], Qt.Orientation.Horizontal)
        self.fit_report()

    def open_report(self) -> None:
        """Give the load report its normal height. Before the first load it is low, and the editor has the space."""
        if self.reports.maximumHeight() == EMPTY_REPORT_HEIGHT:
            self.reports.setMaximumHeight(QWIDGETSIZE_MAX)
            self.fit_report()

    def show_server(self) -> None:
        """Show the API server panel, high enough to read some requests.

        If the window is not wide, the load report is hidden until the panel is closed.
        """
        dock, report = self.serve_dock, self.docks["report"]
        # The report, its neighbour, has little height before the first load.
        self.open_report()
        if dock.isHidden() and report.isVisible() and not report.isFloating() and self.width() < BOTH_WIDTH:
            report.hide()
            self._report_gives_way = True
        dock.show()
        dock.raise_()
        height = max(round(self.height() * SERVER_SHARE), LEAST_SERVER_HEIGHT)
        if not dock.isFloating() and dock.height() < height:
            self.resizeDocks([dock], [height], Qt.Orientation.Vertical)

    def fit_report(self) -> None:
        """Give the load report its normal height: that of its table, or of a few sentences if the table is hidden."""
        self.resizeDocks([self.docks["report"]], [self._report_height], Qt.Orientation.Vertical)

    def settle_report(self, needed_height: int) -> None:
        """Make the load report as high as its content needs, at most its normal height.

        A height that the user has chosen stays. `needed_height`: height of the content in pixels.
        """
        dock = self.docks["report"]
        if dock.isFloating() or dock.isHidden() or dock.height() > self._report_height + _SAME_HEIGHT:
            return
        title = dock.height() - self.reports.height()
        height = min(title + needed_height, self._report_height)
        if abs(dock.height() - height) > _SAME_HEIGHT and self._has_our_height:
            self.resizeDocks([dock], [height], Qt.Orientation.Vertical)
            self._settled_height = height

    @property
    def _has_our_height(self) -> bool:
        """Whether the program has set the present height of the load report; False if the user has dragged its edge."""
        height = self.docks["report"].height()
        return any(abs(height - ours) <= _SAME_HEIGHT for ours in (self._report_height, self._settled_height))

    def make_room_for_proposals(self) -> bool:
        """Make the load report at least `PROPOSALS_REPORT_HEIGHT` high. Return whether it was lower before."""
        dock = self.docks["report"]
        is_low = dock.height() < PROPOSALS_REPORT_HEIGHT
        if is_low:
            self.resizeDocks([dock], [PROPOSALS_REPORT_HEIGHT], Qt.Orientation.Vertical)
        return is_low

    @property
    def _report_height(self) -> int:
        if not self._settings.shows_report_details:
            return SHORT_REPORT_HEIGHT
        return round(self.height() * REPORT_SHARE) if self.height() >= ROOMY_HEIGHT else MIN_REPORT_HEIGHT

    def side_widths(self) -> dict[str, int]:
        """Return the widths of the side docks in pixels, by name; empty if one of them is hidden or floats."""
        sides = {name: self.docks[name] for name in SIDES}
        are_there = all(dock.isVisible() and not dock.isFloating() for dock in sides.values())
        return {name: dock.width() for name, dock in sides.items()} if are_there else {}

    def set_side_widths(self, widths: Mapping[str, int]) -> None:
        """Set the widths of the side docks. `widths`: a result of `side_widths`."""
        names = [name for name in widths if not self.docks[name].isHidden()]
        self.resizeDocks(
            [self.docks[name] for name in names], [widths[name] for name in names], Qt.Orientation.Horizontal
        )

    def show_chat_alone(self, alone: bool) -> None:
        """Show only the chat, with the devices in one line above it; if `alone` is false, show all docks again."""
        layout = self.chat_view.above if alone else self._column
        for position, widget in enumerate((self.device_strip, self.load_question)):
            # Qt hides a widget that gets another parent, so its visibility is set again.
            shown = not widget.isHidden()
            layout.insertWidget(position, widget)
            widget.setVisible(shown)
        self.device_strip.set_line(alone)
        self.pages.setVisible(not alone)
        chat = self.docks["chat"]
        if alone:
            self.docks["models"].hide()
            self.docks["report"].hide()
            chat.setFloating(False)
            chat.show()
        # An empty widget takes the place of the title bar; None restores Qt's own one.
        chat.setTitleBarWidget(self._no_title if alone else None)  # type: ignore[arg-type]

    def apply_palette(self, palette: Palette) -> None:
        """Apply the colours of `palette` and the zoom of the interface to the widgets."""
        self.settings_bar.apply_zoom()
        for widget in (self.device_strip, self.editor, self.model_panel):
            widget.apply_palette(palette)

    def show_question(self, question: LoadQuestion | None) -> None:
        """Show the bar that asks before a load, for instance whether to unload other models; None removes it.

        While the bar is shown, a low window hides the devices' graphs, so that the lanes of layers stay visible.
        """
        # Before the question is shown: the lanes that it is about stay in sight.
        self._has_question = question is not None
        self._fit_graphs()
        self.load_question.set_question(question)

    def _fit_graphs(self) -> None:
        least = ROOMY_HEIGHT if self._has_question else LOW_HEIGHT
        self.device_strip.set_compact(self.height() < least)

    # ------------------------------------------------------------------ events of Qt

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Show the load report again when the API server panel is closed, if opening the panel had hidden the report.

        The report does not return if the panel is hidden in another way, such as by a change of the arrangement.
        """
        if watched is self.serve_dock and event.type() is QEvent.Type.Close and self._report_gives_way:
            self._report_gives_way = False
            self.docks["report"].show()
        return super().eventFilter(watched, event)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit_graphs()

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        """Accept a drag of local files."""
        if event.mimeData().hasUrls() and any(url.isLocalFile() for url in event.mimeData().urls()):
            event.acceptProposedAction()

    def dropEvent(self, event: QDropEvent) -> None:
        """Emit `files_dropped` with the dropped local files."""
        files = tuple(Path(url.toLocalFile()) for url in event.mimeData().urls() if url.isLocalFile())
        if files:
            event.acceptProposedAction()
            self.files_dropped.emit(files)

    def closeEvent(self, event: QCloseEvent) -> None:
        """Store the state, hide the window and end all processes. A second call does nothing."""
        if not self._closing:
            # The order matters: drafts are flushed, then saved, and only then do processes end.
            self._closing = True
            self.about_to_close.emit()
            self._settings.save_window_state(self.saveGeometry(), self.saveState(DOCK_STATE_VERSION))
            self.saving.emit()
            self.hide()
            self.closing.emit()
        event.accept()
