"""The menu bar: every command with its shortcut, in one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from PySide6.QtGui import QAction, QKeySequence

from app.window.main_window import MainWindow

Shortcut = QKeySequence.StandardKey | str | None


@dataclass(frozen=True, slots=True)
class Command:
    """One entry of a menu. `name` is how the program finds it again."""

    name: str
    text: str
    slot: Callable[[], None]
    shortcut: Shortcut = None
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Switch:
    """An entry that is on or off; `turn` is told when people turn it."""

    name: str
    text: str
    is_on: bool
    turn: Callable[[bool], None]
    tip: str = ""


SEPARATOR = None
MenuEntries = tuple[Command | Switch | None, ...]


class Actions:
    """The actions of a window by name; `menus` says which come into which of its menus."""

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
        """Return what each shortcut does, by the keys as this system writes them."""
        native = QKeySequence.SequenceFormat.NativeText
        return {
            action.shortcut().toString(native): action.text().replace("&", "").rstrip("…")
            for action in self._by_name.values()
            if not action.shortcut().isEmpty()
        }

    def enable(self, **enabled: bool) -> None:
        """Enable or disable actions by name."""
        for name, value in enabled.items():
            self._by_name[name].setEnabled(value)

    def _make(self, window: MainWindow, entry: Command | Switch) -> QAction:
        action = QAction(entry.text, window)
        if entry.tip:
            action.setStatusTip(entry.tip)
        if isinstance(entry, Switch):
            action.setCheckable(True)
            action.setChecked(entry.is_on)
            action.triggered.connect(entry.turn)
        else:
            if entry.shortcut is not None:
                action.setShortcut(QKeySequence(entry.shortcut))
            action.triggered.connect(lambda _checked=False: entry.slot())
        self._by_name[entry.name] = action
        return action
