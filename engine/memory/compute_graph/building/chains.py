"""The sections of one model's graphs for one batch, each made once from a chain of a few layers."""

from __future__ import annotations

from engine.layout.engine_parameters import TensorOverride
from engine.memory.compute_graph.building.family import build_graph
from engine.memory.compute_graph.building.graph_tables import GraphTables, Sizes
from engine.memory.compute_graph.building.homes import homes, homes_of_variants, in_their_blocks
from engine.memory.compute_graph.building.placed import Placed
from engine.memory.compute_graph.building.sketch import Batch, HomeOf, Sketch
from engine.memory.compute_graph.ggml.parts import take_apart
from engine.memory.compute_graph.ggml.scheduler import HOST
from engine.memory.compute_graph.ggml.sections import ON_CPU, FarReachError, Marks, Section, memory_at, pin_at
from engine.memory.compute_graph.ggml.simulation import SectionName

_MOST_GRAPHS = 16
"""A drag over devices of several sorts needs a graph for each step."""


class Chains:
    """Makes sections. `pinned`: norms are pinned to the device of their layer; `lends`: devices take over operations
    whose weights are on the host."""

    def __init__(
        self,
        tables: GraphTables,
        batch: Batch,
        *,
        pinned: bool,
        lends: bool,
    ) -> None:
        self.tables = tables
        self._batch = batch
        self._pinned = pinned
        self._lends = lends
        self._known: dict[SectionName, Section] = {}
        self._parts: dict[tuple[tuple[TensorOverride, ...], tuple[int, ...]], tuple[Section, ...]] = {}

    def sizes_matter(self, memory: str, left_out: int) -> Sizes:
        """Return whose bytes tell layers apart in this memory of devices of the sort `left_out`."""
        if not self._lends:
            return "none"
        return "all" if left_out or memory == HOST else "moved"

    def section(self, name: SectionName) -> Section:
        """Return the section of some layers behind others: `("layers", before, layers, left_out, is_last, outer)`, of
        which the first in the graph has none before; or `("end", before, layers, left_out, True, outer)` with the
        output matrix. Layers are given by the numbers of their variants, as `outer` is of what is in no layer;
        `left_out` has the sort of device of each of these layers, and of the output.

        Raises:
            FarReachError: layers read more than their neighbours.
        """
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._make(*name)
        return found

    def _make(
        self,
        kind: str,
        before: tuple[int, ...],
        layers: tuple[int, ...],
        left_out: tuple[int, ...],
        is_last: bool,
        outer: int,
    ) -> Section:
        chain = [self.tables.variants[number] for number in (*before, *layers)]
        memories = [memory_at(place, sort) for place, sort in enumerate(left_out)]
        home = homes_of_variants(
            {memory: variant.moved for memory, variant in zip(memories, chain, strict=False)},
            self.tables.variants[outer].moved,
            {memory: self.tables.left_out[sort] for memory, sort in zip(memories, left_out, strict=True)},
        )
        sketch = self._sketch(home)
        placed = [
            self._placed(variant.layer, memories[place], pin_at(place), is_last=is_last and place == len(chain) - 1)
            for place, variant in enumerate(chain)
        ]
        ends = kind == "end"
        marks = Marks(sketch.graph, {0, len(before)} if ends else {0, len(before), len(chain)})
        family, slides = self.tables.family, self.tables.slides
        build_graph(sketch, family, placed, memories[-1], sliding=slides, ends=ends, passed=marks, inside=bool(before))
        if not sketch.shared.all_inputs:
            raise FarReachError
        places = range(len(memories))
        if before:
            return marks.last(sketch.common, places, open_end=not ends)
        return marks.first(sketch.common, places)

    def parts(self, overrides: tuple[TensorOverride, ...], sorts: tuple[int, ...]) -> tuple[Section, ...]:
        """Return the graph of all layers in parts, given the sort of device of each layer and of the output."""
        found = self._parts.get((overrides, sorts))
        if found is None:
            if len(self._parts) >= _MOST_GRAPHS:
                self._parts.clear()
            found = self._parts[overrides, sorts] = self._take_apart(overrides, sorts)
        return found

    def _take_apart(self, overrides: tuple[TensorOverride, ...], sorts: tuple[int, ...]) -> tuple[Section, ...]:
        tables = self.tables
        memories = [memory_at(place, sort) for place, sort in enumerate(sorts)]
        left_out = {memory: tables.left_out[sort] for memory, sort in zip(memories, sorts, strict=True) if sort}
        home = homes(tables.moved(overrides), left_out)
        if tables.numbers.shares_blocks:
            home = in_their_blocks(home, memories)
        sketch = self._sketch(home)
        last = tables.n_trunk - 1
        placed = [
            self._placed(index, memories[index], pin_at(index), is_last=index == last, home=memories[source])
            for index, source in enumerate(tables.sources)
        ]
        starts: list[tuple[int, int]] = []
        build_graph(
            sketch,
            tables.family,
            placed,
            memories[-1],
            sliding=tables.slides,
            passed=lambda _: starts.append((len(sketch.graph.nodes), len(sketch.graph.leafs))),
        )
        return take_apart(sketch.graph, starts[1:], sketch.common)

    def _sketch(self, home: HomeOf) -> Sketch:
        tables = self.tables
        style = tables.family.style
        return Sketch(tables.numbers, style, self._batch, tables.outer, home, ON_CPU, has_cache=tables.has_cache)

    def _placed(self, index: int, memory: str, pin: int, *, is_last: bool, home: str | None = None) -> Placed:
        tables = self.tables
        pin = pin if self._pinned else -1
        return Placed(tables.layers[index], tables.weights[index], memory, home or memory, pin, is_last, index)
