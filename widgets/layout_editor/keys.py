"""The keys of the editor: what they do, and the words that the help shows for them."""

from __future__ import annotations

from enum import StrEnum

from PySide6.QtCore import Qt

from engine.language import tr


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
    tr("Tab, Shift+Tab"): tr("next or previous boundary, then the output"),
    tr("Left, Right"): tr("previous or next layer"),
    tr("Home, End"): tr("first or last layer"),
    tr("Shift+Left, Shift+Right"): tr("select more or fewer layers"),
    tr("Space"): tr("select the whole run of the layer"),
    tr("Ctrl+Left, Ctrl+Right (or Alt)"): tr("move the boundary by one layer"),
    tr("Ctrl+Up, Ctrl+Down (or Alt)"): tr("move the selected layers, or the output, to the next device"),
    tr("P"): tr("pin the selected layers, or the output, where they are for automatic layouts; again to let them go"),
    tr("Escape"): tr("give up a drag; clear the selection"),
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
