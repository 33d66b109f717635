"""What the editor reports: where the user wants a boundary, a range of layers or the output."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BoundaryMove:
    """The boundary between runs `index` and `index + 1` of the layout at the start wants to be before `layer`."""

    index: int
    layer: int


@dataclass(frozen=True, slots=True)
class RangeMove:
    """Layers `first` to `last`, both included, want to be on `device`, whatever devices they were on at the start."""

    first: int
    last: int
    device: str


@dataclass(frozen=True, slots=True)
class OutputMove:
    """The output layer wants to be on `device`."""

    device: str


@dataclass(frozen=True, slots=True)
class PinToggle:
    """Layers `(first, last)`, both included, or the output layer where that is None, are to be pinned or let go."""

    layers: tuple[int, int] | None


Move = BoundaryMove | RangeMove | OutputMove


@dataclass(frozen=True, slots=True)
class Selection:
    """Layers chosen for a move, `(first, last)` both included, None when there are none."""

    layers: tuple[int, int] | None = None

    def contains(self, layer: int) -> bool:
        return self.layers is not None and self.layers[0] <= layer <= self.layers[1]
