"""The list of loaded models, shown above the recent models: state, keep-alive time, and a button to unload each."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from msgspec import Struct
from PySide6.QtCore import QEvent, QObject, QPoint, QSize, Qt, Signal
from PySide6.QtGui import QActionGroup
from PySide6.QtWidgets import (
    QGridLayout,
    QMenu,
    QPushButton,
    QScrollArea,
    QSizePolicy,
    QToolButton,
    QWidget,
)

from engine.base.language import tr
from widgets.common.boxes import v_box
from widgets.common.elided_label import ElidedLabel
from widgets.common.roles import plain_label, plain_tool_tip

# Keep-alive times: seconds, the short text, and the text in the menu.
KEEP_ALIVES: tuple[tuple[float, str, str], ...] = (
    # Seconds after the last answer; infinity needs no case of its own in comparisons.
    (inf, tr("no limit"), tr("Until the model is unloaded")),
    (3600.0, "1 h", tr("1 hour after the last answer")),
    (1800.0, tr("30 min"), tr("30 minutes after the last answer")),
    (300.0, tr("5 min"), tr("5 minutes after the last answer")),
    (0.0, tr("1 answer"), tr("Until the next answer ends")),
)


class LoadedEntry(Struct, frozen=True):
    """A model that is loaded or being loaded.

    `number`: number that identifies the model in the window.
    `detail`: text on its memory.
    `state`: text such as "idle for 3 min".
    `end_text`: label of the button that unloads the model or cancels its load.
    `may_end`: whether this button is enabled.
    `keep_alive_s`: seconds after the last answer until an idle model is unloaded.
    `is_current`: whether the window shows this model.
    `may_park`: whether the model can be parked now, which unloads it until its next question.
    """

    number: int
    title: str
    detail: str
    state: str
    keep_alive_s: float
    is_current: bool = False
    end_text: str = tr("Unload")
    may_end: bool = True
    tool_tip: str = ""
    may_park: bool = False

    @property
    def keep_word(self) -> str:
        return next((word for seconds, word, _ in KEEP_ALIVES if seconds == self.keep_alive_s), tr("no limit"))


class KeepAliveChoice(Struct, frozen=True):
    """A request to change the keep-alive time of the loaded model with the number `number` (`LoadedEntry.number`)."""

    number: int
    keep_alive_s: float


class LoadedRow(QPushButton):
    """The row of a loaded model: a button that shows title, memory, state and keep-alive time.

    A button on the row unloads the model, or cancels its load.
    """

    end_requested = Signal(int)
    keep_alive_chosen = Signal(KeepAliveChoice)
    park_requested = Signal(int)

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
        """Update the row to `entry`."""
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
            tr("How long {title} stays loaded: {duration}", title=entry.title, duration=entry.keep_word)
        )

    def keep_menu(self) -> QMenu:
        """Return the menu of keep-alive times. The caller shows it."""
        menu = QMenu(self)
        group = QActionGroup(menu)
        for seconds, _, words in KEEP_ALIVES:
            action = menu.addAction(words)
            action.setCheckable(True)
            action.setChecked(seconds == self._entry.keep_alive_s)
            # The default argument keeps the seconds of this round of the loop.
            action.triggered.connect(lambda _checked=False, chosen=seconds: self._choose(chosen))
            group.addAction(action)
        menu.addSeparator()
        park = menu.addAction(tr("Park: Unload Until the Next Question"))
        park.setStatusTip(tr("Unload the model and save its KV state; the next question loads it again"))
        park.setEnabled(self._entry.may_park)
        park.triggered.connect(lambda: self.park_requested.emit(self._entry.number))
        return menu

    def sizeHint(self) -> QSize:
        """Return the size that the row's labels need. The row is a button, whose own size hint ignores its labels."""
        return self._grid.sizeHint()

    def minimumSizeHint(self) -> QSize:
        return self._grid.minimumSize()

    def nextCheckState(self) -> None:
        """Do nothing, so that a click does not check the row: `set_entry` marks the current one."""

    def _build(self) -> None:
        for label in (self._title, self._detail, self._state):
            # The labels cover the row, which is itself the button.
            label.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        for button in (self.end_button, self.keep_button):
            button.setProperty("role", "quiet")
            button.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self.keep_button.setToolTip(tr("How long this model stays loaded"))
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


# Rows shown without scrolling, so that the recent models keep their place.
MAX_SHOWN = 3
SPACING = 4


class LoadedList(QWidget):
    """List of loaded models; hidden if there are none."""

    chosen = Signal(int)  # an entry's number
    end_requested = Signal(int)
    keep_alive_chosen = Signal(KeepAliveChoice)
    park_requested = Signal(int)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._rows: dict[int, LoadedRow] = {}
        self._content = QWidget()
        self._content.installEventFilter(self)
        self._column = v_box(self._content, spacing=SPACING)
        self._scroll = QScrollArea()
        self._scroll.setWidgetResizable(True)
        self._scroll.setWidget(self._content)
        self._scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._scroll.setAccessibleName(tr("Loaded models"))
        self._scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        layout = v_box(self, spacing=SPACING)
        layout.addWidget(plain_label(tr("Loaded"), "dim"))
        layout.addWidget(self._scroll)
        layout.addWidget(plain_label(tr("Recent"), "dim"))
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)
        self.hide()

    def rows(self) -> tuple[LoadedRow, ...]:
        """Return the rows from top to bottom."""
        return tuple(self._rows.values())

    def set_entries(self, entries: Sequence[LoadedEntry]) -> None:
        """Show `entries` in this order. A model that is listed already keeps its widget, and so the keyboard focus."""
        # Hidden at once, deleted later: the click that unloaded a model may come from its own row.
        for number in set(self._rows) - {entry.number for entry in entries}:
            row = self._rows.pop(number)
            self._column.removeWidget(row)
            row.hide()
            row.deleteLater()
        ordered: dict[int, LoadedRow] = {}
        for position, entry in enumerate(entries):
            row = self._rows.get(entry.number) or self._make_row(entry)
            if row.entry != entry:
                row.set_entry(entry)
            if self._column.indexOf(row) != position:
                self._column.insertWidget(position, row)
            ordered[entry.number] = row
        self._rows = ordered
        self.setVisible(bool(entries))
        self._fit_height()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        # Another font or zoom changes the heights of rows, and a scroll area does not report that to its parent.
        if event.type() is QEvent.Type.LayoutRequest:
            self._fit_height()
        return super().eventFilter(watched, event)

    def _make_row(self, entry: LoadedEntry) -> LoadedRow:
        row = LoadedRow(entry)
        row.clicked.connect(lambda: self.chosen.emit(entry.number))
        row.end_requested.connect(self.end_requested)
        row.keep_alive_chosen.connect(self.keep_alive_chosen)
        row.park_requested.connect(self.park_requested)
        return row

    def _fit_height(self) -> None:
        heights = [row.sizeHint().height() for row in self.rows()]
        # A stylesheet lets buttons be squeezed; these are scrolled instead.
        self._content.setMinimumHeight(_stacked(heights))
        self._scroll.setFixedHeight(_stacked(heights[:MAX_SHOWN]))


def _stacked(heights: Sequence[int]) -> int:
    return sum(heights) + SPACING * max(0, len(heights) - 1)
