"""One loaded model in the panel: a click makes it current, small buttons end it and say how long it is kept."""

from __future__ import annotations

from PySide6.QtCore import QPoint, QSize, Qt, Signal
from PySide6.QtGui import QActionGroup
from PySide6.QtWidgets import QGridLayout, QMenu, QPushButton, QSizePolicy, QToolButton, QWidget

from engine.language import tr
from widgets.common.elided_label import ElidedLabel
from widgets.common.tool_tips import plain_tool_tip
from widgets.library.loaded_entry import KEEP_ALIVES, KeepAliveChoice, LoadedEntry


class LoadedRow(QPushButton):
    """Title and what ends it, what it holds, state and keep-alive."""

    end_requested = Signal(int)
    keep_alive_chosen = Signal(KeepAliveChoice)

    def __init__(self, entry: LoadedEntry, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "row")
        self.setCheckable(True)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self._entry = entry
        self._title = ElidedLabel("", "strong")
        self._detail = ElidedLabel("", "dim")
        self._state = ElidedLabel("", "dim")
        self.end_button = QToolButton()
        self.keep_button = QToolButton()
        self._grid = QGridLayout(self)
        self._build()
        self.set_entry(entry)

    @property
    def entry(self) -> LoadedEntry:
        return self._entry

    def set_entry(self, entry: LoadedEntry) -> None:
        """Show `entry`."""
        self._entry = entry
        self._title.setText(entry.title)
        self._detail.setText(entry.detail)
        self._state.setText(entry.state)
        self.keep_button.setText(f"{entry.keep_word} ▾")
        self.end_button.setText(entry.end_text)
        self.end_button.setEnabled(entry.may_end)
        self.setChecked(entry.is_current)
        self.setToolTip(plain_tool_tip(entry.tool_tip))
        self.setAccessibleName(f"{entry.title}, {entry.detail}, {entry.state}")
        self.end_button.setAccessibleName(f"{entry.end_text} {entry.title}")
        self.keep_button.setAccessibleName(
            tr("How long {title} stays loaded: {keep_word}", title=entry.title, keep_word=entry.keep_word)
        )

    def keep_menu(self) -> QMenu:
        """Return the menu of keep-alives; the caller shows it."""
        menu = QMenu(self)
        group = QActionGroup(menu)
        for seconds, _, words in KEEP_ALIVES:
            action = menu.addAction(words)
            action.setCheckable(True)
            action.setChecked(seconds == self._entry.keep_alive_s)
            action.triggered.connect(lambda _checked=False, chosen=seconds: self._choose(chosen))
            group.addAction(action)
        return menu

    def sizeHint(self) -> QSize:
        """As tall as the labels; a button's own hint knows nothing of what lies on it."""
        return self._grid.sizeHint()

    def minimumSizeHint(self) -> QSize:
        return self._grid.minimumSize()

    def nextCheckState(self) -> None:
        """A click asks; what is current is told from outside."""

    def _build(self) -> None:
        for label in (self._title, self._detail, self._state):
            label.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        for button in (self.end_button, self.keep_button):
            button.setProperty("role", "quiet")
            button.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self.keep_button.setToolTip(tr("How long it stays loaded"))
        self.end_button.clicked.connect(lambda: self.end_requested.emit(self._entry.number))
        self.keep_button.clicked.connect(self._show_keep_menu)
        grid = self._grid
        grid.setContentsMargins(10, 6, 4, 6)
        grid.setHorizontalSpacing(4)
        grid.setVerticalSpacing(2)
        grid.addWidget(self._title, 0, 0)
        grid.addWidget(self.end_button, 0, 1, Qt.AlignmentFlag.AlignRight)
        grid.addWidget(self._detail, 1, 0, 1, 2)
        grid.addWidget(self._state, 2, 0)
        grid.addWidget(self.keep_button, 2, 1, Qt.AlignmentFlag.AlignRight)
        grid.setColumnStretch(0, 1)

    def _show_keep_menu(self) -> None:
        menu = self.keep_menu()
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(self.keep_button.mapToGlobal(QPoint(0, self.keep_button.height())))

    def _choose(self, seconds: float) -> None:
        self.keep_alive_chosen.emit(KeepAliveChoice(self._entry.number, seconds))
