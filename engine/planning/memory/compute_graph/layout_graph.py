"""The graph of a layout as a list of sections, from the embeddings to the output matrix.

Layers on one device are a segment of the list. Of the backends only those can matter to them that hold layers around,
that overrides name, or that are the first of their sort: the engine takes the first that can compute something wherever
it has no reason for another. So a segment knows these alone, and steps that were found for it hold for segments amid
other devices of the same sorts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from engine.devices.device import CPU_ID
from engine.planning.layout.engine_parameters import TensorOverride
from engine.planning.memory.backends import CPU_TRAITS, BackendTraits, HostBuffer, SizeRule
from engine.planning.memory.compute_graph.building.graph_tables import SectionMaker, Sizes
from engine.planning.memory.compute_graph.building.layer import memory_of
from engine.planning.memory.compute_graph.devices import backend_devices, backends_of
from engine.planning.memory.compute_graph.ggml.allocator import Size
from engine.planning.memory.compute_graph.ggml.scheduler import Place, Scheduler
from engine.planning.memory.compute_graph.ggml.sections import FarReachError, Section
from engine.planning.memory.compute_graph.ggml.simulation import PlacedSection, SectionName, Segment, Simulation, Steps
from engine.planning.memory.placement import Placement

_MOST_OVERRIDES = 64
_MOST_REMEMBERED = 40000
_MOST_SEGMENTS = 4096

Part = tuple[str, int, int]
"""Device, first and last layer."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """What decides how graphs are cut besides their backends: see `Scheduler`."""

    pipeline: bool
    op_offload: bool
    offload_batch: int


@dataclass(slots=True)
class _PlacedSections:
    """Stops of layouts with the same overrides: of units on one device by its place, of others by unit and places, and
    of the output by places. `outer` is the variant of what is in no layer; `named`: the memories that overrides name
    for weights of each layer, the last for what is in none."""

    overrides: tuple[TensorOverride, ...]
    outer: int
    named: tuple[frozenset[str], ...]
    alike: dict[Sizes, tuple[int, ...]] = field(default_factory=dict)
    uniform: dict[Place, tuple[PlacedSection, ...]] = field(default_factory=dict)
    mixed: dict[tuple[int, tuple[Place, ...]], PlacedSection] = field(default_factory=dict)
    segments: dict[tuple[_Window, int, int, tuple[Part, ...], str], Segment] = field(default_factory=dict)
    ends: dict[tuple[Place, ...], PlacedSection] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    """The backends of a segment: its steps, the memories in the order of the backends, and each device's place. Two
    windows are equal only if they are one."""

    steps: Steps
    memories: tuple[str, ...]
    places: Mapping[str, Place]


class LayoutGraph:
    """Answers for layouts of one batch. `pinned`: norms are pinned to the backend of their device."""

    def __init__(self, section_maker: SectionMaker, scheduling: Scheduling, *, pinned: bool, whole: bool) -> None:
        self._section_makers = section_maker
        self._tables = section_maker.tables
        self._scheduling = scheduling
        self._pinned = pinned
        self._whole = whole
        self._units = section_maker.tables.units
        self._firsts = [first for first, _ in self._units]
        self._lasts = [last for _, last in self._units]
        self._steps: dict[tuple[tuple[str, BackendTraits], ...], Steps] = {}
        self._rigs: dict[tuple[tuple[tuple[str, BackendTraits], ...], HostBuffer], int] = {}
        self._windows: dict[tuple[int, tuple[str, ...], frozenset[str], frozenset[str]], _Window] = {}
        self._sections_of: dict[tuple[TensorOverride, ...], _PlacedSections] = {}
        self._known: dict[tuple[SectionName | Section, tuple[Place, ...]], PlacedSection] = {}

    def sizes(self, placement: Placement) -> dict[str, Size]:
        """Return the compute buffer of each memory.

        Raises:
            FarReachError: the graph cannot be taken apart.
        """
        return self._simulation(placement).sizes()

    def moved(self, placement: Placement) -> frozenset[str]:
        """Return which operations are not all on the device of their layer.

        Raises:
            FarReachError: the graph cannot be taken apart.
        """
        return self._simulation(placement).moved()

    def _simulation(self, placement: Placement) -> Simulation:
        if sum(steps.n_remembered for steps in self._steps.values()) > _MOST_REMEMBERED:
            self._steps.clear()
            self._windows.clear()
            self._sections_of.clear()
        if self._whole:
            return Simulation([self._whole_segment(placement)])
        if not self._units:
            raise FarReachError
        return Simulation(list(self._segments(placement)))

    def _parts(self, placement: Placement) -> list[Part]:
        """Return the layers before those of multi-token prediction, by device."""
        end = self._tables.n_trunk - 1
        runs = [(CPU_ID, 0, placement.leading - 1)] if placement.leading else []
        runs += [(run.device, run.first, run.last) for run in placement.runs]
        parts = [(device, first, min(last, end)) for device, first, last in runs if first <= end]
        device, first, _ = parts[-1]
        # Runs of all layers after the first go with the last layer.
        return [*parts[:-1], (device, first, end)]

    # ------------------------------------------------------------------ segments

    def _whole_segment(self, placement: Placement) -> Segment:
        """Return the whole graph as one segment, of parts that hold for their place in it only."""
        devices = backend_devices(placement)
        window = self._window(placement, self._rig(placement), devices, frozenset(devices))
        layers = _devices(self._parts(placement), 0, self._tables.n_trunk - 1)
        places = [window.places[device] for device in (*layers, placement.output_device)]
        sections = self._section_makers.parts(placement.overrides, tuple(place.left_out for place in places))
        placed_sections = [
            self._same(section, tuple([places[layer] for layer in section.layers])) for section in sections
        ]
        return Segment(window.steps, window.memories, (None, *placed_sections, None))

    def _segments(self, placement: Placement) -> Iterator[Segment]:
        """Yield the segments of a layout: one for each device, or one for all where a device comes more than once."""
        devices = backend_devices(placement)
        parts = self._parts(placement)
        known = self._known_sections(placement)
        n_sections, rig = len(self._units) + 1, self._rig(placement)
        if len({*devices}) < len(devices):
            window = self._window(placement, rig, devices, frozenset(devices))
            yield self._segment(known, window, parts, placement.output_device, 0, n_sections)
            return
        firsts = {placement.traits[device]: device for device in devices[-2::-1]}
        always = set(firsts.values())
        nobody: frozenset[str] = frozenset()
        start = 0
        for _, _, ends in parts:
            end = n_sections if ends == parts[-1][2] else bisect_right(self._lasts, ends)
            if end == start:
                continue  # Its layers add their nodes behind those of the next device.
            layers = self._layers_around(start, end)
            named = known.named[-1].union(*known.named[layers.start : layers.stop]) if placement.overrides else nobody
            around = {device for device, first, last in parts if first < layers.stop and last >= layers.start}
            if end >= len(self._units):
                around.add(placement.output_device)
            around |= always | named
            in_order = tuple(device for device in devices[:-1] if device in around)
            window = self._window(placement, rig, (*in_order, CPU_ID), named)
            yield self._segment(known, window, parts, placement.output_device, start, end)
            start = end

    def _layers_around(self, start: int, end: int) -> range:
        """Return the layers of sections `start` to `end`, of their neighbours, and of those made before these."""
        last = self._lasts[end] if end < len(self._units) else self._tables.n_trunk - 1
        return range(self._firsts[max(0, start - 2)], last + 1)

    def _rig(self, placement: Placement) -> int:
        """Return a number that stands for the devices of the rig, their traits and what the CPU computes with."""
        return self._rigs.setdefault((tuple(placement.traits.items()), placement.host.compute), len(self._rigs))

    def _window(self, placement: Placement, rig: int, devices: tuple[str, ...], named: frozenset[str]) -> _Window:
        """Return the window of these devices, the CPU last: `named` keep their names, others go by their numbers."""
        # A device that the rig does not have breaks a rule, and has no size: it stands where the host would.
        used = {run.device for run in placement.runs} | {placement.output_device}
        unknown = frozenset(used - placement.traits.keys() - {CPU_ID})
        found = self._windows.get((rig, devices, named, unknown))
        if found is None:
            pinned = placement.host.compute
            host = replace(CPU_TRAITS, size_rule=SizeRule(pinned.alignment_bytes), most_bytes=pinned.most_bytes)
            traits = [host if device == CPU_ID else placement.traits[device] for device in devices]
            found = self._windows[rig, devices, named, unknown] = self._make_window(devices, traits, named, unknown)
        return found

    def _make_window(
        self, devices: tuple[str, ...], traits: Sequence[BackendTraits], named: Set[str], unknown: Set[str]
    ) -> _Window:
        names = [
            memory_of(device) if device in named or device == CPU_ID else f"#{number}"
            for number, device in enumerate(devices)
        ]
        entries = tuple(zip(names, traits, strict=True))
        steps = self._steps.get(entries)
        if steps is None:
            scheduling = self._scheduling
            scheduler = Scheduler(
                backends_of(entries),
                pipeline=scheduling.pipeline,
                op_offload=scheduling.op_offload,
                offload_batch=scheduling.offload_batch,
            )
            steps = self._steps[entries] = Steps(scheduler, self._section_makers.section)
        places = {
            device: Place(name, number if self._pinned else -1, self._tables.kernel_class(found.size_rule.kernels))
            for number, (device, (name, found)) in enumerate(zip(devices, entries, strict=True))
        }
        places |= dict.fromkeys(unknown, places[CPU_ID])
        return _Window(steps, tuple(map(memory_of, devices)), places)

    def _segment(
        self, known: _PlacedSections, window: _Window, parts: Sequence[Part], output: str, start: int, end: int
    ) -> Segment:
        """Return the segment of sections `start` to `end`, as far as it was found before: most stay in a drag."""
        around = self._layers_around(start, end)
        first, last = around.start, around.stop - 1
        inside = (part for part in parts if part[1] <= last and part[2] >= first)
        here = tuple([(device, max(first, begins), min(last, ends)) for device, begins, ends in inside])
        key = (window, start, end, here, output if end >= len(self._units) else "")
        found = known.segments.get(key)
        if found is None:
            if len(known.segments) >= _MOST_SEGMENTS:
                known.segments.clear()
            found = known.segments[key] = self._make_segment(known, window, here, output, start, end)
        return found

    def _make_segment(
        self, known: _PlacedSections, window: _Window, parts: Sequence[Part], output: str, start: int, end: int
    ) -> Segment:
        """Return the segment of sections `start` to `end`; its ends are ends of a device."""
        first, last = max(0, start - 1), min(end + 1, len(self._units) + 1)
        placed_sections: list[PlacedSection | None] = [] if start else [None]
        unit = first
        for device, begins, ends in parts:
            if unit >= last or device not in window.places:
                continue
            # Units behind the first are made behind one of the same device, and are as they are anywhere on it.
            amid = bisect_left(self._firsts, begins) + 1 if begins else 0
            until = min(last, bisect_right(self._lasts, ends))
            while unit < min(amid, until):
                placed_sections.append(self._mixed_section(known, window, unit, parts))
                unit += 1
            if until > unit:
                placed_sections += self._uniform_sections(known, window.places[device])[unit:until]
                unit = until
        if last > len(self._units):
            placed_sections.append(self._end(known, window, parts, output))
        if end > len(self._units):
            placed_sections.append(None)
        return Segment(window.steps, window.memories, tuple(placed_sections))

    # ------------------------------------------------------------------ placed sections

    def _known_sections(self, placement: Placement) -> _PlacedSections:
        """Return the placed sections for the overrides of `placement`, as far as they were found before."""
        found = self._sections_of.get(placement.overrides)
        if found is None:
            if len(self._sections_of) >= _MOST_OVERRIDES:
                self._sections_of.clear()
            tables, overrides = self._tables, placement.overrides
            outer = tables.outside(overrides)
            variants = (tables.variants[number] for number in (*tables.alike(overrides, "none"), outer))
            named = tuple(frozenset(variant.moved.values()) for variant in variants)
            found = self._sections_of[overrides] = _PlacedSections(overrides, outer, named)
        return found

    def _mixed_section(
        self, known: _PlacedSections, window: _Window, unit: int, parts: Sequence[Part]
    ) -> PlacedSection:
        """Return the placed section of a unit that has more than one device, counting that of the unit before."""
        start = self._firsts[unit - 1] if unit else 0
        places = tuple(window.places[device] for device in _devices(parts, start, self._lasts[unit]))
        found = known.mixed.get((unit, places))
        if found is None:
            found = known.mixed[unit, places] = self._placed_section(
                known, unit, self._alike(known, start, places), places
            )
        return found

    def _uniform_sections(self, known: _PlacedSections, place: Place) -> tuple[PlacedSection, ...]:
        found = known.uniform.get(place)
        if found is None:
            kinds = self._alike_at(known, place)
            # Most layers are like others, and so are their sections.
            equal: dict[tuple[tuple[int, ...], int, bool], PlacedSection] = {}
            placed_sections = []
            for unit, (first, last) in enumerate(self._units):
                start = self._firsts[unit - 1] if unit else 0
                layers, is_last = kinds[start : last + 1], self._is_last(unit)
                placed = equal.get((layers, first - start, is_last))
                if placed is None:
                    placed = self._placed_section(known, unit, layers, (place,) * len(layers))
                    equal[layers, first - start, is_last] = placed
                placed_sections.append(placed)
            found = known.uniform[place] = tuple(placed_sections)
        return found

    def _placed_section(
        self, known: _PlacedSections, unit: int, layers: tuple[int, ...], places: tuple[Place, ...]
    ) -> PlacedSection:
        behind = self._units[unit][0] - (self._firsts[unit - 1] if unit else 0)
        left_out = tuple(place.left_out for place in places)
        name = ("layers", layers[:behind], layers[behind:], left_out, self._is_last(unit), known.outer)
        return self._same(name, places)

    def _is_last(self, unit: int) -> bool:
        return self._lasts[unit] == self._tables.n_trunk - 1

    def _same(self, name: SectionName | Section, places: tuple[Place, ...]) -> PlacedSection:
        """Return the one object for these places."""
        return self._known.setdefault((name, places), PlacedSection(name, places))

    def _end(self, known: _PlacedSections, window: _Window, parts: Sequence[Part], output: str) -> PlacedSection:
        start, last = self._units[-1]
        devices = (*_devices(parts, start, self._tables.n_trunk - 1), output)
        places = tuple(window.places[device] for device in devices)
        found = known.ends.get(places)
        if found is None:
            layers = self._alike(known, start, places[:-1])
            left_out = tuple(place.left_out for place in places)
            behind = last - start + 1
            name = ("end", layers[:behind], layers[behind:], left_out, True, known.outer)
            found = known.ends[places] = self._same(name, places)
        return found

    def _alike(self, known: _PlacedSections, start: int, places: tuple[Place, ...]) -> tuple[int, ...]:
        return tuple(self._alike_at(known, place)[start + number] for number, place in enumerate(places))

    def _alike_at(self, known: _PlacedSections, place: Place) -> tuple[int, ...]:
        """Return the variant of each layer at a place."""
        sizes = self._section_makers.sizes_matter(place.memory, place.left_out)
        found = known.alike.get(sizes)
        if found is None:
            found = known.alike[sizes] = self._tables.alike(known.overrides, sizes)
        return found


def _devices(parts: Sequence[Part], first: int, last: int) -> tuple[str, ...]:
    """Return the device of each layer from `first` to `last`."""
    found: list[str] = []
    for device, start, end in parts:
        found += [device] * (min(end, last) - max(start, first) + 1)
    return tuple(found)
