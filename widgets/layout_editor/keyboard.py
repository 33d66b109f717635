"""The keyboard in the editor: keys and their commands, the focus, and how keys move the focus.

A boundary, layers, the output, the embedding or the draft model can have the focus. If layers have the focus, they are
also the selected layers.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct
from PySide6.QtCore import Qt

from engine.base.language import tr
from engine.planning.layout.layout import Layout


class Command(StrEnum):
    """A command of the editor that is bound to a key."""

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
    EXPERTS_UP = "experts up"
    EXPERTS_DOWN = "experts down"
    SELECT_RUN = "select run"
    PIN = "pin"
    PIN_EXPERTS = "pin experts"
    CLEAR = "clear"
    FOLD = "fold"
    FOLD_ALL = "fold all"


KEYS: dict[str, str] = {
    tr("Tab, Shift+Tab"): tr("next or previous boundary, then the output, the embedding and the draft"),
    tr("Left, Right"): tr("previous or next layer"),
    tr("Home, End"): tr("first or last layer"),
    tr("Shift+Left, Shift+Right"): tr("select more or fewer layers"),
    tr("Space"): tr("select the group of neighbouring layers on the same device"),
    tr("Ctrl+Left, Ctrl+Right (or Alt)"): tr("move the boundary by one layer"),
    tr("Ctrl+Up, Ctrl+Down (or Alt)"): tr("move the selected layers, the output or the draft to the next device"),
    tr("Ctrl+Shift+Up, Ctrl+Shift+Down"): tr("move the experts of the selected layers to the next device"),
    tr("Shift+P"): tr("pin or unpin the experts of the selected layers"),
    tr("P"): tr("pin or unpin the selected layers, or the output: automatic layouts do not move what is pinned"),
    tr("F"): tr("fold or unfold the devices of the focused computer (only if there are many devices)"),
    tr("Shift+F"): tr("fold or unfold the devices of all computers"),
    tr("Escape"): tr("cancel a drag; clear the selection"),
}
"""Keys and their effects, for the help text."""

_Key = Qt.Key
_PLAIN = {
    _Key.Key_Left: Command.PREVIOUS_LAYER,
    _Key.Key_Right: Command.NEXT_LAYER,
    _Key.Key_Home: Command.FIRST_LAYER,
    _Key.Key_End: Command.LAST_LAYER,
    _Key.Key_Space: Command.SELECT_RUN,
    _Key.Key_P: Command.PIN,
    _Key.Key_Escape: Command.CLEAR,
    _Key.Key_F: Command.FOLD,
}
_SHIFT = {
    _Key.Key_Left: Command.EXTEND_LEFT,
    _Key.Key_Right: Command.EXTEND_RIGHT,
    _Key.Key_P: Command.PIN_EXPERTS,
    _Key.Key_F: Command.FOLD_ALL,
}
_MOVE_EXPERTS = {_Key.Key_Up: Command.EXPERTS_UP, _Key.Key_Down: Command.EXPERTS_DOWN}
_MOVE = {
    _Key.Key_Left: Command.BOUNDARY_LEFT,
    _Key.Key_Right: Command.BOUNDARY_RIGHT,
    _Key.Key_Up: Command.LANE_UP,
    _Key.Key_Down: Command.LANE_DOWN,
}


def command_of(key: int, modifiers: Qt.KeyboardModifier) -> Command | None:
    """Return the command of `key` with `modifiers`, None if there is none."""
    # Arrow keys of the number pad carry it, and on macOS all arrow keys do.
    held = modifiers & ~Qt.KeyboardModifier.KeypadModifier
    table = {
        Qt.KeyboardModifier.NoModifier: _PLAIN,
        Qt.KeyboardModifier.ShiftModifier: _SHIFT,
        Qt.KeyboardModifier.ControlModifier: _MOVE,
        Qt.KeyboardModifier.AltModifier: _MOVE,
        Qt.KeyboardModifier.ControlModifier | Qt.KeyboardModifier.ShiftModifier: _MOVE_EXPERTS,
    }.get(held)
    return None if table is None else table.get(Qt.Key(key))


class BoundaryFocus(Struct, frozen=True):
    """Keyboard focus on the boundary between runs (neighbouring layers on one device) `index` and `index + 1`."""

    index: int


class LayerFocus(Struct, frozen=True):
    """Keyboard focus on a layer. The selection reaches from `anchor` to `layer`."""

    layer: int
    anchor: int

    @property
    def span(self) -> tuple[int, int]:
        return min(self.layer, self.anchor), max(self.layer, self.anchor)


class OutputFocus(Struct, frozen=True):
    """Keyboard focus on the output block."""


class EmbeddingFocus(Struct, frozen=True):
    """Keyboard focus on the token embedding."""


class DraftFocus(Struct, frozen=True):
    """Keyboard focus on the draft model."""


Focus = BoundaryFocus | LayerFocus | OutputFocus | EmbeddingFocus | DraftFocus


class Selection(Struct, frozen=True):
    """Selected layers `(first, last)`, both included; None if no layer is selected."""

    layers: tuple[int, int] | None = None

    def contains(self, layer: int) -> bool:
        return self.layers is not None and self.layers[0] <= layer <= self.layers[1]


def run_of(layout: Layout, layer: int) -> int:
    """Return the index of the run (neighbouring layers on one device) that holds `layer`."""
    return next(index for index, run in enumerate(layout.runs) if run.first <= layer <= run.last)


def next_stop(
    layout: Layout, focus: Focus | None, step: int, *, embedding: bool = False, draft: bool = False
) -> Focus | None:
    """Return the next (`step` 1) or previous (-1) Tab stop: the boundaries, then the output; None past the ends.

    `embedding`: whether the token embedding can be moved. It is then a stop after the output.
    `draft`: whether there is a draft model. It is then the last stop.
    """
    # Layers are no stops of the Tab key: a model has up to hundreds, and the arrow keys go through them.
    stops: list[Focus] = [BoundaryFocus(index) for index in range(len(layout.runs) - 1)]
    stops += [OutputFocus(), *([EmbeddingFocus()] if embedding else []), *([DraftFocus()] if draft else [])]
    if isinstance(focus, LayerFocus):
        # A layer lies between two boundaries: run i between boundaries i - 1 and i.
        index = run_of(layout, focus.layer) + (0 if step > 0 else -1)
    elif focus is None:
        index = 0 if step > 0 else len(stops) - 1
    else:
        index = (stops.index(focus) if focus in stops else len(stops)) + step
    return stops[index] if 0 <= index < len(stops) else None


def next_layer(layout: Layout, focus: Focus | None, step: int, *, extend: bool) -> LayerFocus:
    """Return a focus on the layer left (`step` -1) or right (1) of the present focus.

    `extend`: whether the anchor of the selection stays, so that the selection grows or shrinks.
    """
    last = layout.n_layers - 1
    if isinstance(focus, LayerFocus):
        layer = max(0, min(focus.layer + step, last))
        return LayerFocus(layer, focus.anchor if extend else layer)
    if isinstance(focus, BoundaryFocus):
        run = layout.runs[focus.index]
        # The boundary is between two layers: an arrow key chooses the one on its side.
        layer = run.last if step < 0 else run.last + 1
    else:
        layer = last if isinstance(focus, OutputFocus | DraftFocus) else 0
    return LayerFocus(layer, layer)


def kept_focus(layout: Layout, focus: Focus | None) -> Focus | None:
    """Return the focus to use in the changed layout `layout`: mostly `focus` itself.

    If the focused boundary no longer exists, the nearest one gets the focus. If focused layers no longer exist, return
    None.
    """
    if isinstance(focus, BoundaryFocus):
        count = len(layout.runs) - 1
        return BoundaryFocus(min(focus.index, count - 1)) if count else None
    if isinstance(focus, LayerFocus) and max(focus.span) >= layout.n_layers:
        return None
    return focus
