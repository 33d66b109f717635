"""The graph of a layout as a list of sections, from the embeddings to the output matrix.

Layers on one device are a segment of the list. Only some backends matter to a segment: those of its own layers and
their neighbours, those that overrides name, and the first of each kind of device, since the scheduler uses the first
backend that can compute a node. A segment contains only these. So its cached steps are valid for segments between other
devices of the same kinds, and a dragged boundary only costs the steps that are new.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from engine.devices.device import CPU_ID
from engine.planning.layout.engine_parameters import TensorOverride
from engine.planning.memory.backends import CPU_TRAITS, BackendTraits, HostBuffer, SizeRule
from engine.planning.memory.compute_graph.building.graph_tables import SectionMaker, Sizes
from engine.planning.memory.compute_graph.building.layer import buft_of_device
from engine.planning.memory.compute_graph.devices import backend_devices, backends_of
from engine.planning.memory.compute_graph.ggml.allocator import Size
from engine.planning.memory.compute_graph.ggml.scheduler import Place, Scheduler
from engine.planning.memory.compute_graph.ggml.sections import DistantReadError, Section
from engine.planning.memory.compute_graph.ggml.simulation import (
    PlacedSection,
    SectionName,
    Segment,
    Simulation,
    StepCache,
)
from engine.planning.memory.placement import Placement

_MOST_OVERRIDES = 64
_MOST_REMEMBERED = 40000
_MOST_SEGMENTS = 4096

Part = tuple[str, int, int]
"""Layers of one device: (device id, first layer, last layer)."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Settings of the scheduler that are not properties of its backends; the fields are as in `Scheduler`."""

    pipeline: bool
    op_offload: bool
    offload_batch: int


@dataclass(slots=True)
class _PlacedSections:
    """Cached sections and segments for all layouts with the same overrides.

    A unit is a layer that adds nodes, with the layers before it that add none. A variant is a number for layers with
    equal graphs (`GraphTables.variants`).

    `outer`: variant of the weights outside of blocks.
    `named`: buffer types to which overrides move weights, for each layer and last for the weights outside of blocks.
    `alike`: variant of each layer, by the weights whose bytes are compared.
    `uniform`: sections of all units for a model on a single device, by device.
    `mixed`: section of a unit, by number of the unit and devices of its layers.
    `segments`: cached segments.
    `ends`: section of the output layer, by devices of the last layers and the output layer.
    `plain`: None if the overrides name devices by id; else the object for the same overrides with device ids.
    `names`: name of each device in the overrides, by device id; empty if they name devices by id.
    `renamed`: objects for the same overrides with devices named by position, by the devices of a segment.
    """

    overrides: tuple[TensorOverride, ...]
    outer: int
    named: tuple[frozenset[str], ...]
    alike: dict[Sizes, tuple[int, ...]] = field(default_factory=dict)
    uniform: dict[Place, tuple[PlacedSection, ...]] = field(default_factory=dict)
    mixed: dict[tuple[int, tuple[Place, ...]], PlacedSection] = field(default_factory=dict)
    segments: dict[tuple[_SegmentBackends, int, int, tuple[Part, ...], str], Segment] = field(default_factory=dict)
    ends: dict[tuple[Place, ...], PlacedSection] = field(default_factory=dict)
    plain: _PlacedSections | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    renamed: dict[tuple[str, ...], _PlacedSections] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _SegmentBackends:
    """The backends of a segment (layers on one device). It is compared by identity.

    `steps`: cache of steps with these backends.
    `bufts`: buffer type of each backend.
    `places`: device properties of a layer, by device id.
    """

    steps: StepCache
    bufts: tuple[str, ...]
    places: Mapping[str, Place]


class LayoutGraph:
    """Graphs of all layouts for one batch: lists of segments (layers on one device), which are cached.

    `pinned`: whether norms are pinned to the backend of their layer's device.
    `whole`: whether graphs must be built whole, because layers read tensors of layers that are not their neighbours.
    """

    def __init__(self, section_maker: SectionMaker, scheduling: Scheduling, *, pinned: bool, whole: bool) -> None:
        self._section_maker = section_maker
        self._tables = section_maker.tables
        self._scheduling = scheduling
        self._pinned = pinned
        self._whole = whole
        self._units = section_maker.tables.units
        self._firsts = [first for first, _ in self._units]
        self._lasts = [last for _, last in self._units]
        self._steps: dict[tuple[tuple[str, BackendTraits], ...], StepCache] = {}
        self._rigs: dict[tuple[tuple[tuple[str, BackendTraits], ...], HostBuffer], int] = {}
        self._segment_backends: dict[tuple[int, tuple[str, ...], frozenset[str]], _SegmentBackends] = {}
        self._sections_of: dict[tuple[TensorOverride, ...], _PlacedSections] = {}
        self._interned_sections: dict[tuple[SectionName | Section, tuple[Place, ...]], PlacedSection] = {}

    def sizes(self, placement: Placement) -> dict[str, Size]:
        """Return the size of the compute buffer by buffer type.

        Raises:
            DistantReadError: the graph cannot be built in sections.
        """
        return self._simulation(placement).sizes()

    def moved(self, placement: Placement) -> frozenset[str]:
        """Return the names of fused operations that are not all on the device of their layer.

        Raises:
            DistantReadError: the graph cannot be built in sections.
        """
        return self._simulation(placement).moved()

    def _simulation(self, placement: Placement) -> Simulation:
        if sum(steps.n_remembered for steps in self._steps.values()) > _MOST_REMEMBERED:
            # The caches refer to each other by numbers, so they can only be emptied together.
            self._steps.clear()
            self._segment_backends.clear()
            self._sections_of.clear()
        if self._whole:
            return Simulation([self._whole_segment(placement)])
        if not self._units:
            raise DistantReadError
        return Simulation(list(self._segments(placement)))

    def _parts(self, placement: Placement) -> list[Part]:
        """Return the layers of each device in layer order, except layers for multi-token prediction."""
        end = self._tables.n_trunk - 1
        runs = [(CPU_ID, 0, placement.leading - 1)] if placement.leading else []
        runs += [(run.device, run.first, run.last) for run in placement.runs]
        parts = [(device, first, min(last, end)) for device, first, last in runs if first <= end]
        device, first, _ = parts[-1]
        # Layers that run again (looped models) are placed with the last layer.
        return [*parts[:-1], (device, first, end)]

    # ------------------------------------------------------------------ segments

    def _whole_segment(self, placement: Placement) -> Segment:
        """Return the whole graph as one segment, for models whose layers read tensors of distant layers."""
        devices = backend_devices(placement)
        backends = self._backends_for(placement, self._rig(placement), devices)
        layers = _devices(self._parts(placement), 0, self._tables.n_trunk - 1)
        places = [backends.places[device] for device in (*layers, placement.output_device)]
        # Overrides name devices as the backends do, so that steps hold for all devices of the same kinds.
        names = {device: _name(devices, device) for device in devices}
        overrides = tuple(
            TensorOverride(rule.pattern, names.get(rule.device, rule.device)) for rule in placement.overrides
        )
        sections = self._section_maker.parts(overrides, tuple(place.kernel_class for place in places))
        placed_sections = [
            self._interned(section, tuple([places[layer] for layer in section.layers])) for section in sections
        ]
        return Segment(backends.steps, backends.bufts, (None, *placed_sections, None))

    def _segments(self, placement: Placement) -> Iterator[Segment]:
        """Yield the graph in segments, one for each device.

        If a device is in llama.cpp's list more than once, there is one segment for the whole graph.
        """
        devices = backend_devices(placement)
        parts = self._parts(placement)
        known = self._known_sections(placement)
        n_sections, rig = len(self._units) + 1, self._rig(placement)
        # Pass 3 moves nodes between entries of one device, so with a repeated device every entry matters to every
        # section.
        if len({*devices}) < len(devices):
            backends = self._backends_for(placement, rig, devices)
            named = frozenset[str]().union(*known.named)
            yield self._segment(
                self._renamed(known, devices, named), backends, parts, placement.output_device, 0, n_sections
            )
            return
        # Backwards, so that the first device of each kind stays in the dict. The last device is the CPU and is left
        # out.
        firsts = {placement.traits[device]: device for device in devices[-2::-1]}
        always = set(firsts.values())
        nobody: frozenset[str] = frozenset()
        start = 0
        for _, _, ends in parts:
            end = n_sections if ends == parts[-1][2] else bisect_right(self._lasts, ends)
            if end == start:
                continue  # Its layers add no nodes of their own; the next device's section has them.
            layers = self._layers_around(start, end)
            named = known.named[-1].union(*known.named[layers.start : layers.stop]) if placement.overrides else nobody
            around = {device for device, first, last in parts if first < layers.stop and last >= layers.start}
            if end >= len(self._units):
                around.add(placement.output_device)
            around |= always | named
            in_order = tuple(device for device in devices[:-1] if device in around)
            backends = self._backends_for(placement, rig, (*in_order, CPU_ID))
            yield self._segment(
                self._renamed(known, in_order, named), backends, parts, placement.output_device, start, end
            )
            start = end

    def _layers_around(self, start: int, end: int) -> range:
        """Return the range of layers in the sections `start` to `end` of the graph and in their neighbours."""
        last = self._lasts[end] if end < len(self._units) else self._tables.n_trunk - 1
        # Two units back: the section before the segment is named by the layers of its own predecessor.
        return range(self._firsts[max(0, start - 2)], last + 1)

    def _rig(self, placement: Placement) -> int:
        """Return a number that identifies the backend properties of all devices and the host's compute buffer."""
        return self._rigs.setdefault((tuple(placement.traits.items()), placement.host.compute), len(self._rigs))

    def _backends_for(self, placement: Placement, rig: int, devices: tuple[str, ...]) -> _SegmentBackends:
        """Return the backends of `devices`, the last of which is the CPU. Names of buffer types contain positions.

        `rig`: result of `_rig`.
        """
        # A layout may name a device that the rig lacks. That is a violation and has no size; compute it as the host.
        used = {run.device for run in placement.runs} | {placement.output_device}
        unknown = frozenset(used - placement.traits.keys() - {CPU_ID})
        found = self._segment_backends.get((rig, devices, unknown))
        if found is None:
            pinned = placement.host.compute
            host = replace(
                CPU_TRAITS, size_rule=SizeRule(pinned.alignment_bytes), max_buffer_bytes=pinned.max_buffer_bytes
            )
            traits = [host if device == CPU_ID else placement.traits[device] for device in devices]
            found = self._segment_backends[rig, devices, unknown] = self._make_backends(devices, traits, unknown)
        return found

    def _make_backends(
        self, devices: tuple[str, ...], traits: Sequence[BackendTraits], unknown: Set[str]
    ) -> _SegmentBackends:
        names = [buft_of_device(_name(devices, device)) for device in devices]
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
            steps = self._steps[entries] = StepCache(scheduler, self._section_maker.section)
        places = {
            device: Place(name, number if self._pinned else -1, self._tables.kernel_class(found.size_rule.kernels))
            for number, (device, (name, found)) in enumerate(zip(devices, entries, strict=True))
        }
        places |= dict.fromkeys(unknown, places[CPU_ID])
        return _SegmentBackends(steps, tuple(map(buft_of_device, devices)), places)

    def _segment(
        self,
        known: _PlacedSections,
        backends: _SegmentBackends,
        parts: Sequence[Part],
        output: str,
        start: int,
        end: int,
    ) -> Segment:
        """Return the part of the graph with the sections `start` to `end`, as a segment with its own list of backends.

        Segments are cached, because most of them do not change in a drag. `parts`: layers of each device.
        """
        around = self._layers_around(start, end)
        first, last = around.start, around.stop - 1
        inside = (part for part in parts if part[1] <= last and part[2] >= first)
        # Cut to the surroundings of the segment: a boundary that moves further away must not make another key.
        here = tuple([(device, max(first, begins), min(last, ends)) for device, begins, ends in inside])
        key = (backends, start, end, here, output if end >= len(self._units) else "")
        found = known.segments.get(key)
        if found is None:
            if len(known.segments) >= _MOST_SEGMENTS:
                known.segments.clear()
            found = known.segments[key] = self._make_segment(known, backends, here, output, start, end)
        return found

    def _make_segment(
        self,
        known: _PlacedSections,
        backends: _SegmentBackends,
        parts: Sequence[Part],
        output: str,
        start: int,
        end: int,
    ) -> Segment:
        """Return a new segment with the sections `start` to `end` of the graph; see `_segment`.

        It begins and ends at a boundary between devices.
        """
        first, last = max(0, start - 1), min(end + 1, len(self._units) + 1)
        placed_sections: list[PlacedSection | None] = [] if start else [None]
        unit = first
        for device, begins, ends in parts:
            if unit >= last or device not in backends.places:
                continue
            # All units but the first of a device follow one of the same device, so their sections are uniform.
            amid = bisect_left(self._firsts, begins) + 1 if begins else 0
            until = min(last, bisect_right(self._lasts, ends))
            while unit < min(amid, until):
                placed_sections.append(self._mixed_section(known, backends, unit, parts))
                unit += 1
            if until > unit:
                placed_sections += self._uniform_sections(known, backends.places[device])[unit:until]
                unit = until
        if last > len(self._units):
            placed_sections.append(self._end(known, backends, parts, output))
        if end > len(self._units):
            placed_sections.append(None)
        return Segment(backends.steps, backends.bufts, tuple(placed_sections))

    # ------------------------------------------------------------------ placed sections

    def _known_sections(self, placement: Placement) -> _PlacedSections:
        """Return the cached sections of graphs for layouts with the overrides of `placement`."""
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

    def _renamed(self, known: _PlacedSections, devices: tuple[str, ...], named: frozenset[str]) -> _PlacedSections:
        """Return the cached sections in which overrides name devices by position in `devices`, not by id.

        So cached steps are valid for all devices of the same kinds.

        `devices`: devices of the segment.
        `named`: ids of the devices that its overrides name.
        """
        used = tuple([device if device in named else "" for device in devices])
        if not any(used):
            return known
        found = known.renamed.get(used)
        if found is None:
            names = {device: _name(used, device) for device in used if device}
            outer = self._tables.renamed(known.outer, names)
            found = known.renamed[used] = _PlacedSections(known.overrides, outer, known.named, plain=known, names=names)
        return found

    def _mixed_section(
        self, known: _PlacedSections, backends: _SegmentBackends, unit: int, parts: Sequence[Part]
    ) -> PlacedSection:
        """Return the section of a unit that is on several devices, or on another device than the unit before.

        A unit is a layer that adds nodes, with the layers before it that add none.
        """
        start = self._firsts[unit - 1] if unit else 0
        places = tuple(backends.places[device] for device in _devices(parts, start, self._lasts[unit]))
        found = known.mixed.get((unit, places))
        if found is None:
            found = known.mixed[unit, places] = self._placed_section(
                known, unit, self._variants_of(known, start, places), places
            )
        return found

    def _uniform_sections(self, known: _PlacedSections, place: Place) -> tuple[PlacedSection, ...]:
        found = known.uniform.get(place)
        if found is None:
            kinds = self._variants_at(known, place)
            # Equal layers share one section; without this a model of 80 layers would intern 80 of them.
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
        kernel_class = tuple(place.kernel_class for place in places)
        name = ("layers", layers[:behind], layers[behind:], kernel_class, self._is_last(unit), known.outer)
        return self._interned(name, places)

    def _is_last(self, unit: int) -> bool:
        return self._lasts[unit] == self._tables.n_trunk - 1

    def _interned(self, name: SectionName | Section, places: tuple[Place, ...]) -> PlacedSection:
        """Return the `PlacedSection` with these arguments; equal arguments return the same object.

        So it can be compared by identity, which is faster.
        """
        return self._interned_sections.setdefault((name, places), PlacedSection(name, places))

    def _end(
        self, known: _PlacedSections, backends: _SegmentBackends, parts: Sequence[Part], output: str
    ) -> PlacedSection:
        start, last = self._units[-1]
        devices = (*_devices(parts, start, self._tables.n_trunk - 1), output)
        places = tuple(backends.places[device] for device in devices)
        found = known.ends.get(places)
        if found is None:
            layers = self._variants_of(known, start, places[:-1])
            kernel_class = tuple(place.kernel_class for place in places)
            behind = last - start + 1
            name = ("end", layers[:behind], layers[behind:], kernel_class, True, known.outer)
            found = known.ends[places] = self._interned(name, places)
        return found

    def _variants_of(self, known: _PlacedSections, start: int, places: tuple[Place, ...]) -> tuple[int, ...]:
        return tuple(self._variants_at(known, place)[start + number] for number, place in enumerate(places))

    def _variants_at(self, known: _PlacedSections, place: Place) -> tuple[int, ...]:
        """Return the variant number of each layer (see `Variant`) for layers that are on the device `place`."""
        sizes = self._section_maker.sizes_matter(place.buft, place.kernel_class)
        found = known.alike.get(sizes)
        if found is None:
            if known.plain is None:
                found = self._tables.alike(known.overrides, sizes)
            else:
                plain = self._variants_at(known.plain, place)
                found = tuple([self._tables.renamed(number, known.names) for number in plain])
            known.alike[sizes] = found
        return found


def _name(devices: Sequence[str], device: str) -> str:
    """Return a name for a device by its first position in `devices`, such as "#0"; the CPU keeps its id.

    So equal positions have equal names in all segments.
    """
    return device if device == CPU_ID else f"#{devices.index(device)}"


def _devices(parts: Sequence[Part], first: int, last: int) -> tuple[str, ...]:
    """Return the device id of each layer from `first` to `last`."""
    found: list[str] = []
    for device, start, end in parts:
        found += [device] * (min(end, last) - max(start, first) + 1)
    return tuple(found)
