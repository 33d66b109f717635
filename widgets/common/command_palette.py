"""The command palette: a search field over commands, models, load settings and layouts; Enter runs the selected one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from PySide6.QtCore import QEvent, QObject, Qt, Signal
from PySide6.QtGui import QCloseEvent, QKeyEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QApplication,
    QFrame,
    QHeaderView,
    QLineEdit,
    QTreeWidget,
    QTreeWidgetItem,
    QWidget,
)
from shiboken6 import isValid

from engine.base.language import tr
from widgets.common.boxes import v_box
from widgets.common.roles import plain_label, plain_tool_tip

WIDTH_PX = 640
HEIGHT_PX = 420
MAX_SHOWN = 200
"""Maximum number of rows: a library can have thousands of models, and nobody reads more."""
_LIST_KEYS = (Qt.Key.Key_Up, Qt.Key.Key_Down, Qt.Key.Key_PageUp, Qt.Key.Key_PageDown)


class PaletteEntry(Struct, frozen=True):
    """A row of the palette.

    `title`: text that is searched and shown.
    `group`: menu of the command, or a heading such as "Models"; it is searched too.
    `keys`: shortcut in the notation of the system; empty if there is none.
    `run`: called in the GUI thread, after the palette has closed.
    """

    title: str
    group: str
    run: Callable[[], object]
    keys: str = ""


def matching(entries: Iterable[PaletteEntry], text: str) -> list[PaletteEntry]:
    """Return the entries that contain every word of `text`, ignoring case, best first.

    Ranks, from best to last: the title begins with the text; each word begins a word of the title; the title contains
    the words; title and group together contain them. Entries of the same rank stay in their order.
    """
    wanted = text.casefold().split()
    ranked = ((rank, entry) for entry in entries if (rank := _rank(entry, wanted)) is not None)
    return [entry for _rank_of_it, entry in sorted(ranked, key=lambda pair: pair[0])]


def _rank(entry: PaletteEntry, wanted: Sequence[str]) -> int | None:
    title, group = entry.title.casefold(), entry.group.casefold()
    if title.startswith(" ".join(wanted)):
        return 0
    # A file name such as "qwen3-30b-a3b" has words too.
    starts = title.replace("-", " ").replace("_", " ").replace(".", " ").split()
    if all(any(start.startswith(word) for start in starts) for word in wanted):
        return 1
    if all(word in title for word in wanted):
        return 2
    return 3 if all(word in title or word in group for word in wanted) else None


class CommandPalette(QFrame):
    """Command palette at the top of a window. It closes when an entry is run, on Escape, and when it loses the focus.

    It is not a window, since applications cannot place windows on Wayland. On closing, the previous widget gets the
    focus again, so that a command such as Copy finds its text.
    """

    closed = Signal()

    def __init__(self, entries: Sequence[PaletteEntry], window: QWidget) -> None:
        super().__init__(window)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setAccessibleName(tr("Command palette"))
        self.setAutoFillBackground(True)
        self._window, self._focused_before = window, window.focusWidget()
        self._entries = tuple(entries)
        self._shown: list[PaletteEntry] = []
        self.search_edit = QLineEdit()
        self.search_edit.setPlaceholderText(tr("Search commands, models and layouts…"))
        self.search_edit.setAccessibleName(tr("Search commands, models and layouts"))
        self.search_edit.setClearButtonEnabled(True)
        self.search_edit.textChanged.connect(self._show_matches)
        self.search_edit.installEventFilter(self)
        self.list_view = QTreeWidget()
        self.list_view.setAccessibleName(tr("Commands that match"))
        self.list_view.setColumnCount(3)
        self.list_view.setHeaderHidden(True)
        self.list_view.setRootIsDecorated(False)
        self.list_view.setUniformRowHeights(True)
        self.list_view.setTextElideMode(Qt.TextElideMode.ElideMiddle)
        self.list_view.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list_view.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        # The search field keeps the focus, so that typing goes on after a look at the list.
        self.list_view.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.list_view.itemClicked.connect(lambda _item, _column: self._run())
        header = self.list_view.header()
        header.setStretchLastSection(False)
        header.setSectionResizeMode(0, QHeaderView.ResizeMode.Stretch)
        for column in (1, 2):
            header.setSectionResizeMode(column, QHeaderView.ResizeMode.ResizeToContents)
        self._nothing = plain_label(tr("Nothing matches."), "dim")
        layout = v_box(self, margins=(8, 8, 8, 8))
        layout.addWidget(self.search_edit)
        layout.addWidget(self._nothing)
        layout.addWidget(self.list_view, 1)
        layout.addStretch(0)
        self._show_matches("")
        application = QApplication.instance()
        assert isinstance(application, QApplication)
        application.focusChanged.connect(self._on_focus_changed)

    @property
    def titles(self) -> tuple[str, ...]:
        """The shown titles, from top to bottom."""
        return tuple(entry.title for entry in self._shown)

    def add(self, entries: Iterable[PaletteEntry]) -> None:
        """Add entries after the others, and search again; the selected row stays selected."""
        row = self._row
        self._entries = (*self._entries, *entries)
        self._show_matches(self.search_edit.text())
        self._select(row)

    def open(self) -> None:
        """Show the palette at the top of its window, not wider than the window."""
        window = self._window
        width, height = min(WIDTH_PX, window.width() - 32), min(HEIGHT_PX, window.height() - 120)
        self.setGeometry((window.width() - width) // 2, 60, width, height)
        self.show()
        self.raise_()
        self.search_edit.setFocus()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Handle keys of the search field: arrow keys, Enter and Escape.

        Arrow keys move the selection, Enter runs the selected entry, Escape closes the palette.
        """
        if watched is self.search_edit and event.type() is QEvent.Type.KeyPress and isinstance(event, QKeyEvent):
            if event.key() in _LIST_KEYS:
                self._move(event.key())
                return True
            if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
                self._run()
                return True
            if event.key() == Qt.Key.Key_Escape:
                self.close()
                return True
        return super().eventFilter(watched, event)

    def closeEvent(self, event: QCloseEvent) -> None:
        """Return the focus to the widget that had it, unless the user has clicked another one."""
        focused, before = QApplication.focusWidget(), self._focused_before
        # The widget before may be gone: another model was shown meanwhile, for example.
        if focused is not None and self.isAncestorOf(focused) and before is not None and isValid(before):
            before.setFocus()
        event.accept()
        self.closed.emit()

    def _on_focus_changed(self, _old: QWidget | None, new: QWidget | None) -> None:
        # No widget has the focus while another program has it; the palette stays then.
        if new is not None and not self.isAncestorOf(new):
            self.close()

    def _move(self, key: int) -> None:
        page = max(self.list_view.viewport().height() // max(self.list_view.sizeHintForRow(0), 1) - 1, 1)
        steps = dict(zip(map(int, _LIST_KEYS), (-1, 1, -page, page), strict=True))
        self._select(self._row + steps[int(key)])

    @property
    def _row(self) -> int:
        return self.list_view.currentIndex().row()

    def _select(self, row: int) -> None:
        """Select a row; if there is no such row, select the nearest one."""
        last = len(self._shown) - 1
        self.list_view.setCurrentIndex(self.list_view.model().index(min(max(row, 0), last), 0))

    def _show_matches(self, text: str) -> None:
        self._shown = matching(self._entries, text)[:MAX_SHOWN]
        self.list_view.clear()
        for entry in self._shown:
            item = QTreeWidgetItem([entry.title, entry.group, entry.keys])
            item.setToolTip(0, plain_tool_tip(entry.title))
            for column in (1, 2):
                item.setForeground(column, self.palette().placeholderText())
            self.list_view.addTopLevelItem(item)
        self._nothing.setVisible(not self._shown)
        self.list_view.setVisible(bool(self._shown))
        self._select(0)

    def _run(self) -> None:
        row = self._row
        if 0 <= row < len(self._shown):
            run = self._shown[row].run
            # Closed first: a command may open a dialog, which must not lie under the palette.
            self.close()
            run()
