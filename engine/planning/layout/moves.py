"""Moves: changes that a user makes to a layout by mouse or keyboard, as values that apply themselves.

The layout editor and the share editor report moves; the layout document applies them. All moves of one drag refer to
the layout at the start of the drag.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from engine.base.language import tr
from engine.planning.layout.counts import with_layer_count
from engine.planning.layout.layout import Layout
from engine.planning.layout.parts import MovablePart, place_embedding, place_part
from engine.planning.layout.split_modes import with_shares


@dataclass(frozen=True, slots=True)
class Move(ABC):
    """A change of one layout into another one."""

    @property
    def text(self) -> str:
        """Name of the step of undo."""
        return tr("move layers")

    @abstractmethod
    def apply(self, layout: Layout) -> Layout:
        """Return the changed layout.

        Raises:
            LayoutError: if `layout` has no such boundary or layer.
        """


@dataclass(frozen=True, slots=True)
class BoundaryMove(Move):
    """Put the boundary between runs `index` and `index + 1` before `layer`."""

    index: int
    layer: int

    def apply(self, layout: Layout) -> Layout:
        """Return the layout with the boundary there; each of its two runs keeps a layer."""
        return layout.move_boundary(self.index, self.layer)


@dataclass(frozen=True, slots=True)
class RangeMove(Move):
    """Put layers `first` to `last`, both included, on `device`."""

    first: int
    last: int
    device: str

    def apply(self, layout: Layout) -> Layout:
        """Return the layout with these layers on the device."""
        return layout.move_range(self.first, self.last, self.device)


@dataclass(frozen=True, slots=True)
class OutputMove(Move):
    """Put the output layer on `device`."""

    device: str

    def apply(self, layout: Layout) -> Layout:
        """Return the layout with the output layer on the device."""
        return layout.move_output(self.device)


@dataclass(frozen=True, slots=True)
class PartMove(Move):
    """Put a part of layers `first` to `last`, both included, on `device`; the layers and their KV cache stay."""

    part: MovablePart
    first: int
    last: int
    device: str

    @property
    def text(self) -> str:
        """Name of the step of undo."""
        return tr("move experts") if self.part == "experts" else tr("move dense parts")

    def apply(self, layout: Layout) -> Layout:
        """Return the layout with an override for the part, or without one on the device of its layer."""
        return place_part(layout, self.part, self.first, self.last, self.device)


@dataclass(frozen=True, slots=True)
class EmbeddingMove(Move):
    """Put the token embedding on `device`."""

    device: str

    @property
    def text(self) -> str:
        """Name of the step of undo."""
        return tr("move the embedding")

    def apply(self, layout: Layout) -> Layout:
        """Return the layout with the token embedding on the device."""
        return place_embedding(layout, self.device)


@dataclass(frozen=True, slots=True)
class SharesMove(Move):
    """Split each layer by `shares`, in per cent, in the order of the devices (split modes tensor and row)."""

    shares: tuple[tuple[str, float], ...]

    def apply(self, layout: Layout) -> Layout:
        """Return the layout with these shares; its runs follow them."""
        return with_shares(layout, self.shares)


@dataclass(frozen=True, slots=True)
class CountMove(Move):
    """Put `count` layers on `device`; see `with_layer_count`."""

    device: str
    count: int

    def apply(self, layout: Layout) -> Layout:
        """Return the layout with so many layers on the device."""
        return with_layer_count(layout, self.device, self.count)
