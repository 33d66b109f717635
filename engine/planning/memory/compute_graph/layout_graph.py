"""The graph of a layout as a list of sections, from the embeddings to the output matrix.

A section is consecutive nodes of the graph, mostly those of one layer. The sections of one device are a `SectionGroup`
with its own list of backends: those of the group's layers and of their neighbours, and those of the devices that
overrides name. The first backend of each kind of device is in the list too, because the scheduler uses the first one
that can compute a node. Backends are identified by their position in the list, so cached results are also valid for
other devices of the same kinds. If the user moves a boundary between devices, only the results that depend on it are
computed again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set

from msgspec import Struct, field

from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.planning.layout.engine_parameters import TensorOverride
from engine.planning.memory.backends import CPU_TRAITS, BackendTraits, HostBuffer, SizeRule
from engine.planning.memory.compute_graph.building.graph_tables import SectionMaker, Sizes
from engine.planning.memory.compute_graph.building.layer import buft_of_device
from engine.planning.memory.compute_graph.devices import backend_devices, backends_of
from engine.planning.memory.compute_graph.ggml.allocator import Size
from engine.planning.memory.compute_graph.ggml.pass_cache import PassCache, PlacedSection, SectionGroup, SectionName
from engine.planning.memory.compute_graph.ggml.scheduler import LayerDevice, Scheduler
from engine.planning.memory.compute_graph.ggml.sections import DistantReadError, Section
from engine.planning.memory.compute_graph.ggml.simulation import Simulation
from engine.planning.memory.placement import Placement

_MOST_OVERRIDES = 64
_MOST_REMEMBERED = 400
"""Largest number of cached allocations (results of `PassCache.fill`) of one `LayoutGraph`.

One takes about 11 KB, with all that is cached for it. 1,500 random layouts of a model of 16 layers made 3,600 of them,
and all graphs together took 160 MB. With limits of 500 and 1,000 no drag over eight cards was slower than with a limit
of 40,000 (`benchmarks/drag_time.py`).
"""
_MOST_GROUPS = 4096

DeviceLayers = tuple[str, int, int]
"""Layers of one device: (device id, first layer, last layer)."""


class Scheduling(Struct, frozen=True):
    """Settings of the scheduler that are not properties of its backends.

    `pipeline`: whether pipeline parallelism is on.
    `op_offload`: whether devices compute large batches with weights in host memory.
    `offload_batch`: smallest batch, in tokens, for which devices compute with weights in host memory.
    """

    pipeline: bool
    op_offload: bool
    offload_batch: int


class _PlacedSections(Struct):
    """Cache of graph sections (consecutive nodes, mostly one layer's) for all layouts with the same overrides.

    Layers with equal graphs and equal overrides have the same variant, a number (`GraphTables.variants`).

    `outer`: variant number of the overrides of weights outside of blocks.
    `named`: for each layer, the buffer types to which overrides move its weights. The last item is for the weights
    outside of blocks.
    `alike`: variant of each layer, by the rule (`Sizes`) that says which weights of a variant must have equal sizes.
    `uniform`: sections of all layers if the whole model is on one device, by device.
    `mixed`: section at a boundary between devices, by the section's number and the devices of its layers.
    `groups`: groups of sections; a group is the sections of one device.
    `ends`: section of the output layer, by the devices of the last layers and of the output layer.
    `renamed`: copies of this cache, in which overrides name a device by its position in the group's list of devices.
    A copy is valid for all devices of the same kinds. Its key is that list, with "" for devices that no override names.
    `plain`: if this is such a copy, the cache from which it was made; else None.
    `names`: if this is such a copy, the name of each device of the overrides, by device id; else empty.
    """

    overrides: tuple[TensorOverride, ...]
    outer: int
    named: tuple[frozenset[str], ...]
    alike: dict[Sizes, tuple[int, ...]] = field(default_factory=dict)
    uniform: dict[LayerDevice, tuple[PlacedSection, ...]] = field(default_factory=dict)
    mixed: dict[tuple[int, tuple[LayerDevice, ...]], PlacedSection] = field(default_factory=dict)
    groups: dict[tuple[_GroupBackends, int, int, tuple[DeviceLayers, ...], str], SectionGroup] = field(
        default_factory=dict
    )
    ends: dict[tuple[LayerDevice, ...], PlacedSection] = field(default_factory=dict)
    plain: _PlacedSections | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    renamed: dict[tuple[str, ...], _PlacedSections] = field(default_factory=dict)


class _GroupBackends(Struct, frozen=True, eq=False):
    """The scheduler's backends for the part of the graph on one device. Objects are compared by identity.

    `cache`: cached results of the simulated scheduler and allocator with these backends.
    `bufts`: buffer type of each backend.
    `layer_devices`: properties of each device, by device id.
    """

    cache: PassCache
    bufts: tuple[str, ...]
    layer_devices: Mapping[str, LayerDevice]


class LayoutGraph:
    """The compute graphs of all layouts of one model, for one batch.

    A graph is a list of section groups. A section is consecutive nodes, mostly those of one layer; a group is the
    sections of one device. Groups are cached.

    `pinned`: whether norms are pinned to the backend of their layer's device.
    `whole`: whether graphs must be built whole, because layers read tensors of layers that are not their neighbours.
    """

    def __init__(self, section_maker: SectionMaker, scheduling: Scheduling, *, pinned: bool, whole: bool) -> None:
        self._section_maker = section_maker
        self._tables = section_maker.tables
        self._scheduling = scheduling
        self._pinned = pinned
        self._whole = whole
        self._section_layers = section_maker.tables.section_layers
        self._firsts = [first for first, _ in self._section_layers]
        self._lasts = [last for _, last in self._section_layers]
        self._caches: dict[tuple[tuple[str, BackendTraits], ...], PassCache] = {}
        self._rigs: dict[tuple[tuple[tuple[str, BackendTraits], ...], HostBuffer], int] = {}
        self._group_backends: dict[tuple[int, tuple[str, ...], frozenset[str]], _GroupBackends] = {}
        self._sections_of: dict[tuple[TensorOverride, ...], _PlacedSections] = {}
        self._interned_sections: dict[tuple[SectionName | Section, tuple[LayerDevice, ...]], PlacedSection] = {}

    def sizes(self, placement: Placement) -> dict[str, Size]:
        """Return the size of each compute buffer, by buffer type.

        Raises:
            DistantReadError: the graph cannot be built layer by layer, because a layer reads a tensor of a layer that
            is not its neighbour.
        """
        return self._simulation(placement).sizes()

    def moved(self, placement: Placement) -> frozenset[str]:
        """Return the names of fused operations that have a node on another device than their layer.

        Raises:
            DistantReadError: the graph cannot be built layer by layer, because a layer reads a tensor of a layer that
            is not its neighbour.
        """
        return self._simulation(placement).moved()

    def _simulation(self, placement: Placement) -> Simulation:
        if sum(cache.n_remembered for cache in self._caches.values()) > _MOST_REMEMBERED:
            # The caches refer to each other by numbers, so they can only be emptied together.
            self._caches.clear()
            self._group_backends.clear()
            self._sections_of.clear()
        if self._whole:
            return Simulation([self._whole_group(placement)])
        if not self._section_layers:
            raise DistantReadError
        return Simulation(list(self._groups(placement)))

    def _parts(self, placement: Placement) -> list[DeviceLayers]:
        """Return the layers of each device in layer order, except layers for multi-token prediction."""
        end = self._tables.n_trunk - 1
        runs = [(CPU_ID, 0, placement.leading - 1)] if placement.leading else []
        runs += [(run.device, run.first, run.last) for run in placement.runs]
        parts = [(device, first, min(last, end)) for device, first, last in runs if first <= end]
        device, first, _ = parts[-1]
        # Layers that run again (looped models) are placed with the last layer.
        return [*parts[:-1], (device, first, end)]

    # ------------------------------------------------------------------ section groups

    def _whole_group(self, placement: Placement) -> SectionGroup:
        """Return the whole graph as one group, for models whose layers read tensors of layers that are not their
        neighbours.
        """
        devices = backend_devices(placement)
        backends = self._backends_for(placement, self._rig(placement), devices)
        layers = _devices(self._parts(placement), 0, self._tables.n_trunk - 1)
        layer_devices = [backends.layer_devices[device] for device in (*layers, placement.output_device)]
        # Overrides name devices as the backends do, so that cached results hold for all devices of the same kinds.
        names = {device: _name(devices, device) for device in devices}
        overrides = tuple(
            TensorOverride(rule.pattern, names.get(rule.device, rule.device)) for rule in placement.overrides
        )
        sections = self._section_maker.parts(overrides, tuple(each.kernel_class for each in layer_devices))
        placed_sections = [
            self._interned(section, tuple([layer_devices[layer] for layer in section.layers])) for section in sections
        ]
        return SectionGroup(backends.cache, backends.bufts, (None, *placed_sections, None))

    def _groups(self, placement: Placement) -> Iterator[SectionGroup]:
        """Yield the graph in groups: a group is the nodes of all layers on one device.

        If llama.cpp's device list contains a device more than once, the whole graph is one group.
        """
        devices = backend_devices(placement)
        parts = self._parts(placement)
        known = self._known_sections(placement)
        n_sections, rig = len(self._section_layers) + 1, self._rig(placement)
        # Pass 3 moves nodes between entries of one device, so with a repeated device every entry matters to every
        # section.
        if len({*devices}) < len(devices):
            backends = self._backends_for(placement, rig, devices)
            named = frozenset[str]().union(*known.named)
            yield self._group(
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
            if end >= len(self._section_layers):
                around.add(placement.output_device)
            around |= always | named
            in_order = tuple(device for device in devices[:-1] if device in around)
            backends = self._backends_for(placement, rig, (*in_order, CPU_ID))
            yield self._group(
                self._renamed(known, in_order, named), backends, parts, placement.output_device, start, end
            )
            start = end

    def _layers_around(self, start: int, end: int) -> range:
        """Return the layers of the sections `start` to `end` - 1 of the graph and of the sections next to them.

        A section is consecutive nodes of the graph, mostly those of one layer.
        """
        last = self._lasts[end] if end < len(self._section_layers) else self._tables.n_trunk - 1
        # Two sections back: the name of the section before the group contains the layers of the one before it.
        return range(self._firsts[max(0, start - 2)], last + 1)

    def _rig(self, placement: Placement) -> int:
        """Return a cache key for the backend properties of all devices and for the host's compute buffer."""
        return self._rigs.setdefault((tuple(placement.traits.items()), placement.host.compute), len(self._rigs))

    def _backends_for(self, placement: Placement, rig: int, devices: tuple[str, ...]) -> _GroupBackends:
        """Return the scheduler's list of backends for `devices`, which must end with the CPU.

        A buffer type is named by the position of its device in `devices`. So cached results are also valid for other
        devices with the same properties.

        `rig`: number for the properties of all devices (`_rig`).
        """
        # A layout may name a device that the rig lacks. That is a violation and has no size; compute it as the host.
        used = {run.device for run in placement.runs} | {placement.output_device}
        unknown = frozenset(used - placement.traits.keys() - {CPU_ID})
        found = self._group_backends.get((rig, devices, unknown))
        if found is None:
            pinned = placement.host.compute
            host = replace(
                CPU_TRAITS, size_rule=SizeRule(pinned.alignment_bytes), max_buffer_bytes=pinned.max_buffer_bytes
            )
            traits = [host if device == CPU_ID else placement.traits[device] for device in devices]
            found = self._group_backends[rig, devices, unknown] = self._make_backends(devices, traits, unknown)
        return found

    def _make_backends(
        self, devices: tuple[str, ...], traits: Sequence[BackendTraits], unknown: Set[str]
    ) -> _GroupBackends:
        names = [buft_of_device(_name(devices, device)) for device in devices]
        entries = tuple(zip(names, traits, strict=True))
        cache = self._caches.get(entries)
        if cache is None:
            scheduling = self._scheduling
            scheduler = Scheduler(
                backends_of(entries),
                pipeline=scheduling.pipeline,
                op_offload=scheduling.op_offload,
                offload_batch=scheduling.offload_batch,
            )
            cache = self._caches[entries] = PassCache(scheduler, self._section_maker.section)
        layer_devices = {
            device: LayerDevice(
                name, number if self._pinned else -1, self._tables.kernel_class(found.size_rule.kernels)
            )
            for number, (device, (name, found)) in enumerate(zip(devices, entries, strict=True))
        }
        layer_devices |= dict.fromkeys(unknown, layer_devices[CPU_ID])
        return _GroupBackends(cache, tuple(map(buft_of_device, devices)), layer_devices)

    def _group(
        self,
        known: _PlacedSections,
        backends: _GroupBackends,
        parts: Sequence[DeviceLayers],
        output: str,
        start: int,
        end: int,
    ) -> SectionGroup:
        """Return the part of the graph on one device, the sections `start` to `end` - 1, from the cache if possible.

        A section is consecutive nodes, mostly those of one layer. Most groups of sections stay in the cache when the
        user moves a boundary between devices.

        `parts`: layers of each device.
        `output`: device id of the output layer.
        """
        around = self._layers_around(start, end)
        first, last = around.start, around.stop - 1
        inside = (part for part in parts if part[1] <= last and part[2] >= first)
        # Cut to the surroundings of the group: a boundary that moves further away must not make another key.
        here = tuple([(device, max(first, begins), min(last, ends)) for device, begins, ends in inside])
        key = (backends, start, end, here, output if end >= len(self._section_layers) else "")
        found = known.groups.get(key)
        if found is None:
            if len(known.groups) >= _MOST_GROUPS:
                known.groups.clear()
            found = known.groups[key] = self._make_group(known, backends, here, output, start, end)
        return found

    def _make_group(
        self,
        known: _PlacedSections,
        backends: _GroupBackends,
        parts: Sequence[DeviceLayers],
        output: str,
        start: int,
        end: int,
    ) -> SectionGroup:
        """Make the group of the sections `start` to `end` - 1 of the graph (the nodes of all layers on one device).

        A section is consecutive nodes, mostly those of one layer.

        `parts`: layers of each device in the group and next to it.
        `output`: device id of the output layer.
        """
        first, last = max(0, start - 1), min(end + 1, len(self._section_layers) + 1)
        placed_sections: list[PlacedSection | None] = [] if start else [None]
        number = first
        for device, begins, ends in parts:
            if number >= last or device not in backends.layer_devices:
                continue
            # All sections but the first of a device follow one on the same device, so they are uniform.
            amid = bisect_left(self._firsts, begins) + 1 if begins else 0
            until = min(last, bisect_right(self._lasts, ends))
            while number < min(amid, until):
                placed_sections.append(self._mixed_section(known, backends, number, parts))
                number += 1
            if until > number:
                placed_sections += self._uniform_sections(known, backends.layer_devices[device])[number:until]
                number = until
        if last > len(self._section_layers):
            placed_sections.append(self._end(known, backends, parts, output))
        if end > len(self._section_layers):
            placed_sections.append(None)
        return SectionGroup(backends.cache, backends.bufts, tuple(placed_sections))

    # ------------------------------------------------------------------ placed sections

    def _known_sections(self, placement: Placement) -> _PlacedSections:
        """Return the cache of graph sections for the overrides of `placement`; make an empty one if there is none.

        A section is consecutive nodes, mostly those of one layer. All layouts with the same overrides use one cache.
        """
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
        """Return a copy of the cache `known` in which overrides name devices by their position in `devices`.

        The copy can also be used for other devices of the same kinds. If `named` has none of `devices`, `known` itself
        is returned.

        `known`: cache in which overrides name devices by their ids.
        `devices`: ids of the devices that can compute a part of the graph (the nodes of all layers on one device).
        `named`: ids of the devices to which overrides move weights of these layers.
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
        self, known: _PlacedSections, backends: _GroupBackends, number: int, parts: Sequence[DeviceLayers]
    ) -> PlacedSection:
        """Return the section with the index `number` (nodes of one layer or a few), at a boundary between devices.

        At a boundary, a section has layers on several devices, or the section before it is on another device.

        `parts`: layers of each device.
        """
        start = self._firsts[number - 1] if number else 0
        layer_devices = tuple(backends.layer_devices[device] for device in _devices(parts, start, self._lasts[number]))
        found = known.mixed.get((number, layer_devices))
        if found is None:
            found = known.mixed[number, layer_devices] = self._placed_section(
                known, number, self._variants_of(known, start, layer_devices), layer_devices
            )
        return found

    def _uniform_sections(self, known: _PlacedSections, device: LayerDevice) -> tuple[PlacedSection, ...]:
        found = known.uniform.get(device)
        if found is None:
            kinds = self._variants_at(known, device)
            # Equal layers share one section; without this a model of 80 layers would intern 80 of them.
            equal: dict[tuple[tuple[int, ...], int, bool], PlacedSection] = {}
            placed_sections = []
            for number, (first, last) in enumerate(self._section_layers):
                start = self._firsts[number - 1] if number else 0
                layers, is_last = kinds[start : last + 1], self._is_last(number)
                placed = equal.get((layers, first - start, is_last))
                if placed is None:
                    placed = self._placed_section(known, number, layers, (device,) * len(layers))
                    equal[layers, first - start, is_last] = placed
                placed_sections.append(placed)
            found = known.uniform[device] = tuple(placed_sections)
        return found

    def _placed_section(
        self, known: _PlacedSections, number: int, layers: tuple[int, ...], layer_devices: tuple[LayerDevice, ...]
    ) -> PlacedSection:
        split_at = self._section_layers[number][0] - (self._firsts[number - 1] if number else 0)
        kernel_class = tuple(each.kernel_class for each in layer_devices)
        name = ("layers", layers[:split_at], layers[split_at:], kernel_class, self._is_last(number), known.outer)
        return self._interned(name, layer_devices)

    def _is_last(self, number: int) -> bool:
        return self._lasts[number] == self._tables.n_trunk - 1

    def _interned(self, name: SectionName | Section, layer_devices: tuple[LayerDevice, ...]) -> PlacedSection:
        """Return the `PlacedSection` (the nodes of one layer, with their devices) that has these arguments.

        Equal arguments return the same object, so that objects can be compared by identity, which is faster.
        """
        return self._interned_sections.setdefault((name, layer_devices), PlacedSection(name, layer_devices))

    def _end(
        self, known: _PlacedSections, backends: _GroupBackends, parts: Sequence[DeviceLayers], output: str
    ) -> PlacedSection:
        start, last = self._section_layers[-1]
        devices = (*_devices(parts, start, self._tables.n_trunk - 1), output)
        layer_devices = tuple(backends.layer_devices[device] for device in devices)
        found = known.ends.get(layer_devices)
        if found is None:
            layers = self._variants_of(known, start, layer_devices[:-1])
            kernel_class = tuple(each.kernel_class for each in layer_devices)
            split_at = last - start + 1
            name = ("end", layers[:split_at], layers[split_at:], kernel_class, True, known.outer)
            found = known.ends[layer_devices] = self._interned(name, layer_devices)
        return found

    def _variants_of(
        self, known: _PlacedSections, start: int, layer_devices: tuple[LayerDevice, ...]
    ) -> tuple[int, ...]:
        return tuple(self._variants_at(known, device)[start + number] for number, device in enumerate(layer_devices))

    def _variants_at(self, known: _PlacedSections, device: LayerDevice) -> tuple[int, ...]:
        """Return the variant number of every layer of the model, if the layer is on `device`.

        Layers with equal graphs and equal overrides have the same number (`GraphTables.variants`).
        """
        sizes = self._section_maker.sizes_matter(device.buft, device.kernel_class)
        found = known.alike.get(sizes)
        if found is None:
            if known.plain is None:
                found = self._tables.alike(known.overrides, sizes)
            else:
                plain = self._variants_at(known.plain, device)
                found = tuple([self._tables.renamed(number, known.names) for number in plain])
            known.alike[sizes] = found
        return found


def _name(devices: Sequence[str], device: str) -> str:
    """Return a name for a device by its first position in `devices`, such as "#0"; the CPU keeps its id.

    Results that are cached under such names can be used for other devices at the same positions.
    """
    return device if device == CPU_ID else f"#{devices.index(device)}"


def _devices(parts: Sequence[DeviceLayers], first: int, last: int) -> tuple[str, ...]:
    """Return the device id of each layer from `first` to `last`."""
    found: list[str] = []
    for device, start, end in parts:
        found += [device] * (min(end, last) - max(start, first) + 1)
    return tuple(found)
