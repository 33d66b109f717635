"""The keys of the editor: what they do, and the words that the help shows for them."""

from __future__ import annotations

from enum import StrEnum

from PySide6.QtCore import Qt


class Command(StrEnum):
    """What a key asks for."""

    PREVIOUS_LAYER = "previous layer"
    NEXT_LAYER = "next layer"
    FIRST_LAYER = "first layer"
    LAST_LAYER = "last layer"
    EXTEND_LEFT = "extend left"
    EXTEND_RIGHT = "extend right"
    BOUNDARY_LEFT = "boundary left"
    BOUNDARY_RIGHT = "boundary right"
    LANE_UP = "lane up"
    LANE_DOWN = "lane down"
    SELECT_RUN = "select run"
    PIN = "pin"
    CLEAR = "clear"


KEYS: dict[str, str] = {
    "Tab, Shift+Tab": "next or previous boundary, then the output",
    "Left, Right": "previous or next layer",
    "Home, End": "first or last layer",
    "Shift+Left, Shift+Right": "select more or fewer layers",
    "Space": "select the whole run of the layer",
    "Ctrl+Left, Ctrl+Right (or Alt)": "move the boundary by one layer",
    "Ctrl+Up, Ctrl+Down (or Alt)": "move the selected layers, or the output, to the next device",
    "P": "pin the selected layers, or the output, where they are for automatic layouts; again to let them go",
    "Escape": "give up a drag; clear the selection",
}
"""Keys and what they do, for the help text."""

_Key = Qt.Key
_PLAIN = {
    _Key.Key_Left: Command.PREVIOUS_LAYER,
    _Key.Key_Right: Command.NEXT_LAYER,
    _Key.Key_Home: Command.FIRST_LAYER,
    _Key.Key_End: Command.LAST_LAYER,
    _Key.Key_Space: Command.SELECT_RUN,
    _Key.Key_P: Command.PIN,
    _Key.Key_Escape: Command.CLEAR,
}
_SHIFT = {_Key.Key_Left: Command.EXTEND_LEFT, _Key.Key_Right: Command.EXTEND_RIGHT}
_MOVE = {
    _Key.Key_Left: Command.BOUNDARY_LEFT,
    _Key.Key_Right: Command.BOUNDARY_RIGHT,
    _Key.Key_Up: Command.LANE_UP,
    _Key.Key_Down: Command.LANE_DOWN,
}


def command_of(key: int, modifiers: Qt.KeyboardModifier) -> Command | None:
    """Return what `key` asks for with `modifiers`, None if nothing."""
    held = modifiers & ~Qt.KeyboardModifier.KeypadModifier
    table = {
        Qt.KeyboardModifier.NoModifier: _PLAIN,
        Qt.KeyboardModifier.ShiftModifier: _SHIFT,
        Qt.KeyboardModifier.ControlModifier: _MOVE,
        Qt.KeyboardModifier.AltModifier: _MOVE,
    }.get(held)
    return None if table is None else table.get(Qt.Key(key))
