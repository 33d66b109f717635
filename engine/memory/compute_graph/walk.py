"""A layout as a walk over the sections of its graph, from the embeddings to the output matrix."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from engine.devices.device import CPU_ID
from engine.memory.compute_graph.building.chains import Chains
from engine.memory.compute_graph.ggml.scheduler import HOST, Place, Scheduler
from engine.memory.compute_graph.ggml.sections import FarReachError
from engine.memory.compute_graph.ggml.simulation import SectionName, Simulation, Stop
from engine.memory.placement import Placement

Part = tuple[str, int, int]
"""Device, first and last layer."""


class Walk:
    """Answers for layouts that have the same devices in the same order. `pins`: the backend of each device's norms."""

    def __init__(self, chains: Chains, scheduler: Scheduler, pins: dict[str, int], *, whole: bool) -> None:
        self._chains = chains
        self._scheduler = scheduler
        self._pins = pins
        self._whole = whole
        self._units = chains.tables.units
        self._firsts = [first for first, _ in self._units]
        self._lasts = [last for _, last in self._units]
        self._simulation = Simulation(scheduler, chains.section)
        self._uniform: dict[str, tuple[Stop, ...]] = {}
        self._mixed: dict[tuple[int, tuple[str, ...]], Stop] = {}
        self._ends: dict[tuple[tuple[str, ...], str], Stop] = {}
        self._places: dict[str, Place] = {}
        self._known: dict[tuple[SectionName, tuple[Place, ...]], Stop] = {}

    def sizes(self, placement: Placement) -> dict[str, int]:
        """Return the compute buffer of each memory in bytes.

        Raises:
            FarReachError: the graph cannot be taken apart.
        """
        simulation, stops = self._ready(placement)
        return simulation.sizes(stops)

    def moved(self, placement: Placement) -> frozenset[str]:
        """Return which operations are not all on the device of their layer.

        Raises:
            FarReachError: the graph cannot be taken apart.
        """
        simulation, stops = self._ready(placement)
        return simulation.moved(stops)

    def _ready(self, placement: Placement) -> tuple[Simulation, list[Stop]]:
        parts = self._parts(placement)
        if not self._whole:
            return self._simulation, self._stops(parts, placement.output_device)
        section = self._chains.whole(parts, self._pins, placement.output_device)
        return Simulation(self._scheduler, lambda _: section), [Stop(("whole", (), (), (), True), ())]

    def _parts(self, placement: Placement) -> list[Part]:
        """Return the layers before those of multi-token prediction, by device."""
        end = self._chains.tables.n_trunk - 1
        runs = [(CPU_ID, 0, placement.leading - 1)] if placement.leading else []
        runs += [(run.device, run.first, run.last) for run in placement.runs]
        parts = [(device, first, min(last, end)) for device, first, last in runs if first <= end]
        device, first, _ = parts[-1]
        # Runs of all layers after the first go with the last layer.
        return [*parts[:-1], (device, first, end)]

    # ------------------------------------------------------------------ stops

    def _stops(self, parts: list[Part], output: str) -> list[Stop]:
        """Return a stop for each unit of layers and one for the output: those amid a part are as they always are."""
        if not self._units:
            raise FarReachError
        stops: list[Stop] = []
        for device, first, last in parts:
            amid = bisect_left(self._firsts, first) + 1 if first else 0
            end = bisect_right(self._lasts, last)
            for unit in range(len(stops), min(amid, end)):
                stops.append(self._mixed_stop(unit, parts))
            if end > len(stops):
                stops += self._uniform_stops(device)[len(stops) : end]
        stops.append(self._end(parts, output))
        return stops

    def _mixed_stop(self, unit: int, parts: list[Part]) -> Stop:
        """Return the stop of a unit that has more than one device, counting that of the unit before."""
        start = self._firsts[unit - 1] if unit else 0
        devices = _devices(parts, start, self._lasts[unit])
        found = self._mixed.get((unit, devices))
        if found is None:
            places = tuple(self._place(device) for device in devices)
            found = self._mixed[unit, devices] = self._stop(unit, self._alike(start, devices), places)
        return found

    def _uniform_stops(self, device: str) -> tuple[Stop, ...]:
        found = self._uniform.get(device)
        if found is None:
            place, kinds = self._place(device), tuple(self._chains.alike(device))
            # Most layers are like others, and so are their stops.
            known: dict[tuple[tuple[int, ...], int, bool], Stop] = {}
            stops = []
            for unit, (first, last) in enumerate(self._units):
                start = self._firsts[unit - 1] if unit else 0
                layers, is_last = kinds[start : last + 1], self._is_last(unit)
                stop = known.get((layers, first - start, is_last))
                if stop is None:
                    stop = known[layers, first - start, is_last] = self._stop(unit, layers, (place,) * len(layers))
                stops.append(stop)
            found = self._uniform[device] = tuple(stops)
        return found

    def _stop(self, unit: int, layers: tuple[int, ...], places: tuple[Place, ...]) -> Stop:
        behind = self._units[unit][0] - (self._firsts[unit - 1] if unit else 0)
        left_out = tuple(place.left_out for place in places)
        return self._same(("layers", layers[:behind], layers[behind:], left_out, self._is_last(unit)), places)

    def _is_last(self, unit: int) -> bool:
        return self._lasts[unit] == self._chains.tables.n_trunk - 1

    def _same(self, name: SectionName, places: tuple[Place, ...]) -> Stop:
        """Return the one stop for these places."""
        return self._known.setdefault((name, places), Stop(name, places))

    def _end(self, parts: list[Part], output: str) -> Stop:
        start, last = self._units[-1]
        devices = _devices(parts, start, self._chains.tables.n_trunk - 1)
        found = self._ends.get((devices, output))
        if found is None:
            layers = self._alike(start, devices)
            places = tuple(self._place(device) for device in (*devices, output))
            left_out = tuple(place.left_out for place in places)
            behind = last - start + 1
            found = self._same(("end", layers[:behind], layers[behind:], left_out, True), places)
            self._ends[devices, output] = found
        return found

    def _alike(self, start: int, devices: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self._chains.alike(device)[start + number] for number, device in enumerate(devices))

    def _place(self, device: str) -> Place:
        found = self._places.get(device)
        if found is None:
            memory = HOST if device == CPU_ID else device
            found = Place(memory, self._pins.get(device, -1), self._chains.left_out(device))
            self._places[device] = found
        return found


def _devices(parts: list[Part], first: int, last: int) -> tuple[str, ...]:
    """Return the device of each layer from `first` to `last`."""
    found: list[str] = []
    for device, start, end in parts:
        found += [device] * (min(end, last) - max(start, first) + 1)
    return tuple(found)
