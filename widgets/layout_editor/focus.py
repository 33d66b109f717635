"""What has the keyboard inside the editor, and where the keys take it. No Qt in here."""

from __future__ import annotations

from dataclasses import dataclass

from engine.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class BoundaryFocus:
    """The boundary between runs `index` and `index + 1`."""

    index: int


@dataclass(frozen=True, slots=True)
class LayerFocus:
    """A layer; `anchor` is where a selection that ends at it began."""

    layer: int
    anchor: int

    @property
    def span(self) -> tuple[int, int]:
        return min(self.layer, self.anchor), max(self.layer, self.anchor)


@dataclass(frozen=True, slots=True)
class OutputFocus:
    """The output block."""


Focus = BoundaryFocus | LayerFocus | OutputFocus


def run_of(layout: Layout, layer: int) -> int:
    """Return the index of the run that holds `layer`."""
    return next(index for index, run in enumerate(layout.runs) if run.first <= layer <= run.last)


def next_stop(layout: Layout, focus: Focus | None, step: int) -> Focus | None:
    """Return the next (`step` 1) or previous (-1) Tab stop: the boundaries, then the output; None past the ends."""
    stops: list[Focus] = [BoundaryFocus(index) for index in range(len(layout.runs) - 1)]
    stops.append(OutputFocus())
    if isinstance(focus, LayerFocus):
        # A layer lies between two boundaries: run i between boundaries i - 1 and i.
        index = run_of(layout, focus.layer) + (0 if step > 0 else -1)
    elif focus is None:
        index = 0 if step > 0 else len(stops) - 1
    else:
        index = stops.index(focus) + step
    return stops[index] if 0 <= index < len(stops) else None


def next_layer(layout: Layout, focus: Focus | None, step: int, *, extend: bool) -> LayerFocus:
    """Return the layer left (`step` -1) or right (1) of the focus; `extend` keeps the selection's beginning."""
    last = layout.n_layers - 1
    if isinstance(focus, LayerFocus):
        layer = max(0, min(focus.layer + step, last))
        return LayerFocus(layer, focus.anchor if extend else layer)
    if isinstance(focus, BoundaryFocus):
        run = layout.runs[focus.index]
        layer = run.last if step < 0 else run.last + 1
    else:
        layer = last if isinstance(focus, OutputFocus) else 0
    return LayerFocus(layer, layer)


def kept_focus(layout: Layout, focus: Focus | None) -> Focus | None:
    """Return `focus` if `layout` still has it, else what is nearest to it."""
    if isinstance(focus, BoundaryFocus):
        count = len(layout.runs) - 1
        return BoundaryFocus(min(focus.index, count - 1)) if count else None
    if isinstance(focus, LayerFocus) and max(focus.span) >= layout.n_layers:
        return None
    return focus
