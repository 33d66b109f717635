"""The fewest devices that hold a model, each loaded in proportion to what it can take.

Sizes are given, nothing is looked up: layers with their caches, and what devices have for them. The last layer is the
output layer. The search finds the smallest share of every device's room that still places all that can be placed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

_PRECISION = 1e-6
_MAX_STEPS = 64

Placed = tuple[tuple[str, tuple[int, ...]], ...]
"""Device ids with their ascending layers, ordered by first layer; devices without layers are left out."""


@dataclass(frozen=True, slots=True)
class Place:
    """A device to fill, with the bytes that it has for layers. `rank` 0 is a card with its own memory, 1 an integrated
    one, 2 a remote one: a lower rank is filled before a higher one and gets the later layers."""

    id: str
    room_bytes: int
    rank: int = 0


def place_layers(layers: Sequence[int], places: Sequence[Place], *, spread: bool = False) -> Placed:
    """Return which of `layers` (bytes each) go to which of `places`, as many as can; `spread` uses all of these.

    Where not all layers go, the output layer goes nowhere: it would take the room of repeating ones.
    """
    ordered = sorted(places, key=lambda place: (place.rank, -place.room_bytes))
    if spread:
        ordered = [replace(place, rank=0) for place in ordered]
    found: Placed = ()
    for sizes in (layers, layers[:-1]):
        for count in [len(ordered)] if spread else range(1, len(ordered) + 1):
            found = _best_fit(sizes, ordered[:count])
            if _count(found) == len(sizes):
                return found
    return found


def _best_fit(layers: Sequence[int], places: Sequence[Place]) -> Placed:
    """Fill rank after rank, each as evenly as its rooms allow; the first rank gets the last layers."""
    found: Placed = ()
    left = len(layers)
    for rank in dict.fromkeys(place.rank for place in places):
        group = [place for place in places if place.rank == rank]
        best = _greedy(layers[:left], group, 1.0)
        target, low, high = _count(best), 0.0, 1.0
        for _ in range(_MAX_STEPS):
            if high - low <= _PRECISION:
                break
            factor = (low + high) / 2
            tried = _greedy(layers[:left], group, factor)
            if _count(tried) == target:
                best, high = tried, factor
            else:
                low = factor
        left -= target
        found = best + found
    return found


def _greedy(layers: Sequence[int], places: Sequence[Place], factor: float) -> Placed:
    """Give layers out from the last to the first, to the places from the last to the first, none twice."""
    taken: list[list[int]] = [[] for _ in places]
    index = len(layers) - 1
    for place, indices in zip(reversed(places), reversed(taken), strict=True):
        room_bytes = int(place.room_bytes * factor)
        while index >= 0 and layers[index] <= room_bytes:
            indices.insert(0, index)
            room_bytes -= layers[index]
            index -= 1
    return tuple((place.id, tuple(indices)) for place, indices in zip(places, taken, strict=True) if indices)


def _count(placed: Placed) -> int:
    return sum(len(indices) for _, indices in placed)
