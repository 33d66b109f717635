"""Changes that a user makes to a layout by mouse or keyboard ("moves"), as values with an `apply` method.

The layout editor and the share editor emit moves, and the layout document applies them. Each move of a drag is applied
to the layout at the start of the drag, not to the result of the move before it.
"""

from __future__ import annotations

from abc import abstractmethod

from msgspec import Struct

from engine.base.language import tr
from engine.planning.layout.counts import with_layer_count
from engine.planning.layout.layout import Layout
from engine.planning.layout.parts import MovablePart, place_embedding, place_part
from engine.planning.layout.split_modes import with_shares


class Move(Struct, frozen=True):
    """One change of a layout that a user made by mouse or keyboard."""

    @property
    def text(self) -> str:
        """Text of the change in the undo menu."""
        return tr("move layers")

    @abstractmethod
    def apply(self, layout: Layout) -> Layout:
        """Return `layout` with this change made.

        Raises:
            LayoutError: `layout` has no boundary or layer with the index of this change.
        """
        raise NotImplementedError


class BoundaryMove(Move, frozen=True):
    """A move of the boundary between runs `index` and `index + 1`: run `index + 1` then begins with `layer`.

    A run is neighbouring layers on one device.
    """

    index: int
    layer: int

    def apply(self, layout: Layout) -> Layout:
        """Return `layout` with the boundary moved; each of its two runs keeps at least one layer."""
        return layout.move_boundary(self.index, self.layer)


class RangeMove(Move, frozen=True):
    """A move of layers `first` to `last`, both included, to `device`."""

    first: int
    last: int
    device: str

    def apply(self, layout: Layout) -> Layout:
        """Return `layout` with layers `first` to `last` on `device`."""
        return layout.move_range(self.first, self.last, self.device)


class OutputMove(Move, frozen=True):
    """A move of the output layer to `device`."""

    device: str

    def apply(self, layout: Layout) -> Layout:
        """Return `layout` with the output layer on `device`."""
        return layout.move_output(self.device)


class PartMove(Move, frozen=True):
    """A move of the experts or the dense weights of layers `first` to `last`, both included, to `device`.

    The other weights of these layers and their KV cache are not moved.
    """

    part: MovablePart
    first: int
    last: int
    device: str

    @property
    def text(self) -> str:
        """Text of the change in the undo menu."""
        return tr("move experts") if self.part == "experts" else tr("move attention and dense feed-forward")

    def apply(self, layout: Layout) -> Layout:
        """Return `layout` with the part of these layers on `device`, by an override where one is needed.

        A layer that is on `device` itself needs an override only if another override would move its part away.
        """
        return place_part(layout, self.part, self.first, self.last, self.device)


class EmbeddingMove(Move, frozen=True):
    """A move of the token embedding to `device`."""

    device: str

    @property
    def text(self) -> str:
        """Text of the change in the undo menu."""
        return tr("move the embedding")

    def apply(self, layout: Layout) -> Layout:
        """Return `layout` with the token embedding on `device`."""
        return place_embedding(layout, self.device)


class DraftMove(Move, frozen=True):
    """A move of the draft model or the MTP heads to `device`.

    A draft model has its own layout, so the main model's layout does not change. For MTP heads, the last layer of the
    model is moved.
    """

    device: str

    @property
    def text(self) -> str:
        """Text of the change in the undo menu."""
        return tr("move the draft")

    def apply(self, layout: Layout) -> Layout:
        """Return `layout` unchanged, because it does not contain the draft model's layout.

        `Edit.after` makes this move.
        """
        return layout


class SharesMove(Move, frozen=True):
    """A change of the device shares (split mode tensor or row) to `shares`: (device id, per cent), in device order."""

    shares: tuple[tuple[str, float], ...]

    def apply(self, layout: Layout) -> Layout:
        """Return `layout` with the new shares, and with layers on each device in proportion to its share."""
        return with_shares(layout, self.shares)


class CountMove(Move, frozen=True):
    """A change of the number of layers on `device` to `count`.

    Added layers come from the CPU first, then from other devices (`with_layer_count`).
    """

    device: str
    count: int

    def apply(self, layout: Layout) -> Layout:
        """Return `layout` with `count` layers on `device`."""
        return with_layer_count(layout, self.device, self.count)
