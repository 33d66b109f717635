"""The fewest devices that hold a model, each loaded in proportion to what it can take.

Sizes are given, nothing is looked up: layers with their caches, free memory and graphs. The last layer is the output
layer. The search finds the smallest share of every device's room that still places all layers that can be placed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from engine.units import GIB, KIB, MIB

AUTOMATIC = -1
"""As a number of layers: as many as fit."""
_MINIMUM_BYTES = 457 * MIB
_METAL_MINIMUM_BYTES = 512 * MIB
_FORCED_FACTOR = 1000.0
"""What is usable is multiplied with this where a number of layers was asked for whatever is free."""
_PRECISION = 1e-6
_MAX_STEPS = 64

System = Literal["linux", "darwin", "windows"]
Placed = tuple[tuple[str, tuple[int, ...]], ...]
"""Device ids with their ascending layers, ordered by first layer; devices without layers are left out."""


class MemoryShortError(Exception):
    """The layers that stay on the CPU do not go into the host's memory."""


class RequiredFullError(Exception):
    """The whole model was wanted on devices and does not go there."""


class HostRequiredFullError(MemoryShortError, RequiredFullError):
    """The whole model was wanted, and what stays on the CPU does not go into the free memory."""


@dataclass(frozen=True, slots=True)
class Place:
    """A device to fill. `rank` 0 is a card with its own memory, 1 an integrated one, 2 a remote one: a lower rank is
    filled before a higher one and gets the later layers. `minimum_bytes` stays free; None is the library's own."""

    id: str
    free_bytes: int
    library: str = ""
    rank: int = 0
    minimum_bytes: int | None = None

    @property
    def reserve_bytes(self) -> int:
        if self.minimum_bytes is not None:
            return self.minimum_bytes
        return _METAL_MINIMUM_BYTES if self.library == "Metal" else _MINIMUM_BYTES


@dataclass(frozen=True, slots=True)
class MemoryView:
    """What is known of a model's memory. `layers` are weights and cache of each, wherever they were counted;
    `graphs` are compute buffers of the devices known so far: a device that is missing here is not used."""

    layers: tuple[int, ...]
    graphs: Mapping[str, int]
    input_bytes: int = 0
    host_graph_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host: bytes in all, free, and free swap."""

    total_bytes: int
    free_bytes: int
    swap_bytes: int = 0
    system: System = "linux"


@dataclass(frozen=True, slots=True)
class Wishes:
    """`n_layers` on devices (`AUTOMATIC`, 0 none, k exactly k, more than there are: all); `spread` uses all devices;
    `backoff` is the part of the free memory left alone after failures; `overhead_bytes` is kept on every device."""

    n_layers: int = AUTOMATIC
    require_full: bool = False
    spread: bool = False
    backoff: float = 0.0
    overhead_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Room:
    id: str
    usable_bytes: int
    rank: int
    taken: tuple[int, ...] = field(default=())


def search(view: MemoryView, places: Sequence[Place], host: HostMemory, wishes: Wishes = Wishes()) -> Placed:
    """Return which layers go to which of `places`; those in none stay on the CPU.

    Raises:
        RequiredFullError: where all layers were required on devices and do not go there.
        MemoryShortError: where the host cannot hold the others.
    """
    placed = place_layers(view, places, wishes)
    sizes = dict(enumerate(view.layers))
    on_devices = {index for _, indices in placed for index in indices}
    device_bytes = sum(sizes[index] for index in on_devices) + sum(view.graphs.get(name, 0) for name, _ in placed)
    host_bytes = view.input_bytes + view.host_graph_bytes
    host_bytes += sum(size for index, size in sizes.items() if index not in on_devices)
    if wishes.require_full:
        wanted = len(sizes) if wishes.n_layers < 0 else min(len(sizes), wishes.n_layers)
        if places and len(on_devices) < wanted:
            raise RequiredFullError("unable to load full model on GPU")
        if host_bytes > host.free_bytes:
            raise HostRequiredFullError("model requires more system memory than is currently available ")
    if host.system == "darwin":
        # One memory for both: more than all of it would lock the system.
        return () if device_bytes > host.total_bytes else placed
    if host_bytes > host.free_bytes + host.swap_bytes:
        available = _in_units(host.free_bytes + host.swap_bytes)
        raise MemoryShortError(
            f"model requires more system memory ({_in_units(host_bytes)}) than is available ({available})"
        )
    return placed


def place_layers(view: MemoryView, places: Sequence[Place], wishes: Wishes = Wishes()) -> Placed:
    """Return the best placement of one library's devices: the most layers, the first library among equals."""
    ordered = sorted(places, key=lambda place: (place.rank, -place.free_bytes))
    best: Placed = ()
    for library in dict.fromkeys(place.library for place in ordered):
        group = [place for place in ordered if place.library == library]
        held = [index for index, place in enumerate(group) if view.graphs.get(place.id, 0)]
        rooms = [_Room(place.id, _usable_bytes(view, place, wishes), place.rank) for place in group]
        found = _assign(view.layers, rooms, wishes, held[-1] if held else 0)
        if _count(found) > _count(best):
            best = found
    return best


def _usable_bytes(view: MemoryView, place: Place, wishes: Wishes) -> int:
    if place.id not in view.graphs:
        return 0
    kept = int(place.free_bytes * wishes.backoff) + place.reserve_bytes + wishes.overhead_bytes
    return max(0, place.free_bytes - kept - view.graphs[place.id])


def _assign(layers: Sequence[int], rooms: list[_Room], wishes: Wishes, last: int) -> Placed:
    """Place all layers; where that does not go place the repeating ones, without the output layer."""
    if wishes.n_layers >= 0 or wishes.spread:
        rooms = [replace(room, rank=0) for room in rooms]
    found: Placed = ()
    for sizes in (layers, layers[:-1]):
        wanted = min(len(sizes), wishes.n_layers)
        counts = [len(rooms)] if wishes.spread else range(last + 1, len(rooms) + 1)
        for count in counts:
            force = count == len(rooms) and not wishes.require_full
            found = _best_fit(sizes, rooms[:count], wanted, force=force)
            if _count(found) in (len(sizes), wanted):
                break
        if _count(found) == len(layers):
            break
    return found


def _best_fit(layers: Sequence[int], rooms: Sequence[_Room], wanted: int, *, force: bool) -> Placed:
    """Fill rank after rank, each as evenly as its rooms allow; the first rank gets the last layers."""
    found: Placed = ()
    left = len(layers)
    for rank in dict.fromkeys(room.rank for room in rooms):
        group = [room for room in rooms if room.rank == rank]
        high = _FORCED_FACTOR if wanted >= 0 and force else 1.0
        best = _greedy(layers[:left], group, high, wanted)
        target, low = _count(best), 0.0
        for _ in range(_MAX_STEPS):
            if high - low <= _PRECISION:
                break
            factor = (low + high) / 2
            tried = _greedy(layers[:left], group, factor, wanted)
            if _count(tried) == target:
                best, high = tried, factor
            else:
                low = factor
        left -= target
        wanted -= target if wanted >= 0 else 0
        found = best + found
    return found


def _greedy(layers: Sequence[int], rooms: Sequence[_Room], factor: float, wanted: int) -> Placed:
    """Give layers out from the last to the first, to the rooms from the last to the first, none twice."""
    taken: list[list[int]] = [[] for _ in rooms]
    place = len(rooms) - 1
    room_bytes = int(rooms[place].usable_bytes * factor) if rooms else 0
    index = len(layers) - 1
    n_taken = 0
    while index >= 0 and place >= 0 and n_taken != wanted:
        if layers[index] <= room_bytes:
            taken[place].insert(0, index)
            room_bytes -= layers[index]
            index -= 1
            n_taken += 1
            continue
        place -= 1
        room_bytes = int(rooms[place].usable_bytes * factor)
    return tuple((room.id, tuple(indices)) for room, indices in zip(rooms, taken, strict=True) if indices)


def _count(placed: Placed) -> int:
    return sum(len(indices) for _, indices in placed)


def _in_units(size_bytes: int) -> str:
    """Return a size with one decimal, as these messages have it."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"
