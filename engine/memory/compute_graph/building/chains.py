"""The sections of one model's graphs for one batch, each made once from a chain of a few layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.devices.device import CPU_ID
from engine.layout.engine_parameters import TensorOverride
from engine.memory.compute_graph.building.family import build_graph
from engine.memory.compute_graph.building.graph_tables import GraphTables
from engine.memory.compute_graph.building.homes import homes, in_their_blocks
from engine.memory.compute_graph.building.placed import Placed
from engine.memory.compute_graph.building.sketch import Batch, Sketch
from engine.memory.compute_graph.ggml.scheduler import HOST
from engine.memory.compute_graph.ggml.sections import ON_CPU, FarReachError, Marks, Section, memory_at, pin_at, whole
from engine.memory.compute_graph.ggml.simulation import SectionName


class Chains:
    """Makes sections. `pinned`: norms are pinned to the device of their layer; `lends`: devices take over operations
    whose weights are on the host; `left_out`: by device, the names of the weights that it has no kernel for."""

    def __init__(
        self,
        tables: GraphTables,
        batch: Batch,
        overrides: tuple[TensorOverride, ...],
        left_out: Mapping[str, frozenset[str]],
        *,
        pinned: bool,
        lends: bool,
    ) -> None:
        self.tables = tables
        self._batch = batch
        self._overrides = overrides
        self._left_out = left_out
        self._sorts = [frozenset(), *dict.fromkeys(left_out.values())]
        self._pinned = pinned
        self._lends = lends
        self._lends_everywhere = lends and (bool(left_out) or any(each.device == CPU_ID for each in overrides))
        self._alike = tables.alike(overrides, by_size=False)
        self._alike_by_size = tables.alike(overrides, by_size=True) if lends else self._alike
        self._known: dict[SectionName, Section] = {}

    def alike(self, device: str) -> tuple[int, ...]:
        """Return for each layer the first one that stands for it on `device`."""
        by_size = self._lends_everywhere or (self._lends and device == CPU_ID)
        return self._alike_by_size if by_size else self._alike

    def left_out(self, device: str) -> int:
        """Return a number for the weights that `device` has no kernel for, 0 where it has all."""
        names = self._left_out.get(device)
        return self._sorts.index(names) if names else 0

    def section(self, name: SectionName) -> Section:
        """Return the section of some layers behind others: `("layers", before, layers, left_out, is_last)`, of which
        the first in the graph has none before; or `("end", before, layers, left_out, True)` with the output matrix.
        `left_out` has the sort of device of each of these layers, and of the output.

        Raises:
            FarReachError: layers read more than their neighbours.
        """
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._make(*name)
        return found

    def _make(
        self, kind: str, before: tuple[int, ...], layers: tuple[int, ...], left_out: tuple[int, ...], is_last: bool
    ) -> Section:
        chain = (*before, *layers)
        memories = [memory_at(place, sort) for place, sort in enumerate(left_out)]
        sketch = self._sketch({memory: self._sorts[sort] for memory, sort in zip(memories, left_out, strict=True)})
        placed = [
            self._placed(layer, memories[place], pin_at(place), is_last=is_last and place == len(chain) - 1)
            for place, layer in enumerate(chain)
        ]
        ends = kind == "end"
        marks = Marks(sketch.graph, {0, len(before)} if ends else {0, len(before), len(chain)})
        family, slides = self.tables.family, self.tables.slides
        build_graph(sketch, family, placed, memories[-1], sliding=slides, ends=ends, passed=marks, inside=bool(before))
        if not sketch.shared.all_inputs:
            raise FarReachError
        return marks.last(sketch.common, open_end=not ends) if before else marks.first(sketch.common)

    def whole(self, parts: list[tuple[str, int, int]], pins: Mapping[str, int], output: str) -> Section:
        """Return the graph of all layers as one section, given device, first and last layer of each part."""
        memories = [_memory(device) for device, first, end in parts for _ in range(first, end + 1)]
        sketch = self._sketch(self._left_out, memories)
        last, sources = self.tables.n_trunk - 1, self.tables.sources
        placed = [
            self._placed(
                index, _memory(device), pins.get(device, -1), is_last=index == last, home=memories[sources[index]]
            )
            for device, first, end in parts
            for index in range(first, end + 1)
        ]
        return whole(build_graph(sketch, self.tables.family, placed, _memory(output), sliding=self.tables.slides))

    def _sketch(self, left_out: Mapping[str, frozenset[str]], memories: Sequence[str] = ()) -> Sketch:
        tables = self.tables
        home = homes(self._overrides, {memory: names for memory, names in left_out.items() if names})
        if tables.numbers.shares_blocks:
            home = in_their_blocks(home, memories)
        style = tables.family.style
        return Sketch(tables.numbers, style, self._batch, tables.outer, home, ON_CPU, has_cache=tables.has_cache)

    def _placed(self, index: int, memory: str, pin: int, *, is_last: bool, home: str | None = None) -> Placed:
        tables = self.tables
        pin = pin if self._pinned else -1
        return Placed(tables.layers[index], tables.weights[index], memory, home or memory, pin, is_last, index)


def _memory(device: str) -> str:
    return HOST if device == CPU_ID else device
