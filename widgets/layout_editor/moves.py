"""What the editor reports besides moves: pins and the selection."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PinToggle:
    """Layers `(first, last)`, both included, or the output layer where that is None, are to be pinned or let go."""

    layers: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Selection:
    """Layers chosen for a move, `(first, last)` both included, None when there are none."""

    layers: tuple[int, int] | None = None

    def contains(self, layer: int) -> bool:
        return self.layers is not None and self.layers[0] <= layer <= self.layers[1]
