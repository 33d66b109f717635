"""The actions of the menu bar: each has a name, a text, a shortcut and the function that it calls."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from PySide6.QtGui import QAction, QKeySequence

from app.window.main_window import MainWindow

Shortcut = QKeySequence.StandardKey | str | None


class Command(Struct, frozen=True):
    """A menu entry that runs a command.

    `name`: key of the action in `Actions`. `text`: text of the entry. `slot`: function that a click calls.
    `tip`: text of the tooltip.
    `other_shortcut`: a second shortcut, for keyboards on which the first one needs Shift.
    """

    name: str
    text: str
    slot: Callable[[], None]
    shortcut: Shortcut = None
    tip: str = ""
    other_shortcut: str = ""


class Switch(Struct, frozen=True):
    """A menu entry with a check mark.

    `name`: key of the action in `Actions`. `is_on`: whether the entry is checked at the start.
    `turn`: function that a click calls with the new state. `tip`: text of the tooltip.
    """

    name: str
    text: str
    is_on: bool
    turn: Callable[[bool], None]
    tip: str = ""


SEPARATOR = None
MenuEntries = tuple[Command | Switch | None, ...]


class Actions:
    """The actions (`QAction`) of a window by name. `menus`: the entries of each menu, by the menu's name."""

    def __init__(self, window: MainWindow, menus: tuple[tuple[str, MenuEntries], ...]) -> None:
        self._by_name: dict[str, QAction] = {}
        for name, entries in menus:
            menu = window.menus[name]
            for entry in entries:
                if entry is SEPARATOR:
                    menu.addSeparator()
                else:
                    menu.addAction(self._make(window, entry))

    def __getitem__(self, name: str) -> QAction:
        return self._by_name[name]

    def shortcuts(self) -> dict[str, str]:
        """Return a mapping from shortcuts, in the notation of this system, to the texts of their actions."""
        native = QKeySequence.SequenceFormat.NativeText
        return {
            action.shortcut().toString(native): action.text().replace("&", "").rstrip("…")
            for action in self._by_name.values()
            if not action.shortcut().isEmpty()
        }

    def enable(self, **enabled: bool) -> None:
        """Enable or disable actions. `enabled`: the new state by the name of the action."""
        for name, value in enabled.items():
            self._by_name[name].setEnabled(value)

    def _make(self, window: MainWindow, entry: Command | Switch) -> QAction:
        action = QAction(entry.text, window)
        if entry.tip:
            action.setStatusTip(entry.tip)
        if isinstance(entry, Switch):
            action.setCheckable(True)
            action.setChecked(entry.is_on)
            # `triggered` and not `toggled`: only a choice of a person is stored, not a state that the program sets.
            action.triggered.connect(entry.turn)
        else:
            if entry.shortcut is not None:
                keys = [QKeySequence(entry.shortcut), QKeySequence(entry.other_shortcut)]
                action.setShortcuts([key for key in keys if not key.isEmpty()])
            # `triggered` passes the checked state, which slots of commands do not take.
            action.triggered.connect(lambda _checked=False: entry.slot())
        self._by_name[entry.name] = action
        return action
