"""What the graphs of one model are made of: its layers and their weights, which of them are alike, and the sections of
graphs that stand for all layers of a kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from engine.model.architectures.record import Architecture
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.engine_parameters import TensorOverride
from engine.planning.layout.split_modes import count_unlisted_layers
from engine.planning.memory.backends import ALL_KERNELS, Kernels, find_unsupported
from engine.planning.memory.compute_graph.building.context import Batch, GraphContext
from engine.planning.memory.compute_graph.building.graph import Family, build_graph, find_family
from engine.planning.memory.compute_graph.building.hparams import LayerNumbers, Numbers, read_layers, read_numbers
from engine.planning.memory.compute_graph.building.layer import (
    HomeOf,
    Placed,
    Weights,
    block_weights,
    global_weights,
    homes,
    homes_of_variants,
    in_their_blocks,
    memory_of,
)
from engine.planning.memory.compute_graph.ggml.scheduler import HOST
from engine.planning.memory.compute_graph.ggml.sections import (
    ON_CPU,
    FarReachError,
    Marks,
    Section,
    memory_at,
    pin_at,
    take_apart,
)
from engine.planning.memory.compute_graph.ggml.simulation import SectionName
from engine.planning.memory.hyper_parameters import HyperParameters, MissingNumberError, number
from engine.planning.memory.tensors import OverrideHomes

Sizes = Literal["none", "moved", "all"]
"""Whose bytes tell layers apart."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What stands for all layers that make the same graph: one of them (-1: what is in no layer), and the memories that
    overrides take weights of it to, by name."""

    layer: int
    moved: Mapping[str, str]


class GraphTables:
    """What the graphs of one model are made of, whatever the context."""

    def __init__(
        self, model: ModelFile, hyper: HyperParameters, architecture: Architecture, override_homes: OverrideHomes
    ) -> None:
        family = find_family(model, architecture)
        if family is None:
            raise MissingNumberError(
                f'the arithmetic of the compute buffers of "{model.architecture}" is not known yet'
            )
        self.family: Family = family
        self.hyper = hyper
        self.n_unlisted: int = count_unlisted_layers(model)
        self.has_cache = architecture.has_cache and family.record.reads_cache
        self.numbers: Numbers = read_numbers(model, hyper, architecture, family.record, family.style.positions)
        self.layers: tuple[LayerNumbers, ...] = read_layers(model, hyper, family.record, family.style.rope)
        if family.record.part:
            self.layers = self.layers[: _count_layers(model, family.record.part, len(self.layers))]
        self.layers *= hyper.n_loops
        stacks = self.numbers.stacks
        self.sources: tuple[int, ...] = tuple(
            index % self.numbers.n_blocks if stacks is None else stacks.block(index)
            for index in range(len(self.layers))
        )
        self.weights: tuple[Weights, ...] = tuple(
            _weights_of(model, source, index, family.record.part) for index, source in enumerate(self.sources)
        )
        self.outer: Weights = global_weights(model)
        adds = any(layer.adds_input for layer in self.layers)
        shares = hyper.cache_of != tuple(range(hyper.n_layers)) or "per_layer_token_embd" in self.outer
        self.is_whole: bool = (
            family.record.every_layer or shares or adds or self.numbers.shares_blocks or any(hyper.indexer_widths)
        )
        """Whether layers read what others made that are not their neighbours, so that the graph has no sections."""
        self.slides: bool = any(layer.is_swa for layer in self.layers)
        shapes = [
            (numbers, source if stacks else 0, tuple(sorted((name, facts.ne) for name, facts in weights.items())))
            for numbers, weights, source in zip(self.layers, self.weights, self.sources, strict=True)
        ]
        known: dict[object, int] = {}
        self.kinds: tuple[int, ...] = tuple(known.setdefault(shape, len(known)) for shape in shapes)
        self._try_graph(model)
        self._model = model
        self.architecture: Architecture = architecture
        self.left_out: list[frozenset[str]] = [frozenset()]
        """Names of the weights that devices of a sort have no kernel for; of sort 0 are those that have all."""
        self._kernel_classes: dict[Kernels, int] = {ALL_KERNELS: 0}
        self.variants: list[Variant] = []
        """Found by the numbers that `alike` and `outside` give: the same for equal ones, whatever the overrides."""
        self._numbers: dict[object, int] = {}
        self._homes = override_homes

    def kernel_class(self, kernels: Kernels) -> int:
        """Return the sort of a device with these kernels, by the weights that it leaves to the host."""
        found = self._kernel_classes.get(kernels)
        if found is None:
            names = find_unsupported(self._model, self.architecture, kernels)
            if names not in self.left_out:
                self.left_out.append(names)
            found = self._kernel_classes[kernels] = self.left_out.index(names)
        return found

    def _try_graph(self, model: ModelFile) -> None:
        """Build one layer of each kind, so that tensors which do not fit show here and not while somebody drags."""
        batch = Batch(2, 1, 2, 256, 256, 1, 1, "f16", "f16", flash=False, v_trans=True, offload_kqv=True)
        ctx = GraphContext(
            self.numbers, self.family.style, batch, self.outer, lambda _, memory: memory, 0, has_cache=self.has_cache
        )
        firsts = {kind: index for index, kind in reversed(list(enumerate(self.kinds)))}
        layers = [
            Placed(self.layers[index], self.weights[index], HOST, HOST, -1, False, index)
            for index in sorted(firsts.values())
        ]
        counts: list[int] = []
        try:
            build_graph(
                ctx,
                self.family,
                layers,
                HOST,
                sliding=self.slides,
                passed=lambda _: counts.append(len(ctx.graph.nodes)),
            )
        except (ArithmeticError, LookupError, AssertionError, ValueError) as error:
            raise MissingNumberError(
                f"the tensors of the file do not make a graph of {model.architecture} ({error})"
            ) from error
        silent = {
            self.kinds[layer.index]
            for layer, (start, end) in zip(layers, pairwise(counts), strict=True)
            if start == end
        }
        self.units: tuple[tuple[int, int], ...] = tuple(_units([kind in silent for kind in self.kinds]))
        """First and last layer of each part of the graph that can stand for itself, without what follows the last."""

    def alike(self, overrides: tuple[TensorOverride, ...], sizes: Sizes) -> tuple[int, ...]:
        """Return for each layer the number of its variant: layers have the same if they make the same graph, with
        weights in the same places under `overrides`. A device that borrows weights from the host makes room for them:
        for those that lie there `sizes` tell layers apart too.
        """
        moved = self.moved(overrides)
        found = []
        for index, (kind, weights) in enumerate(zip(self.kinds, self.weights, strict=True)):
            here = [facts for facts in weights.values() if facts.name in moved] if moved else []
            counted = here if sizes == "moved" else weights.values() if sizes == "all" else ()
            places = tuple(moved.get(facts.name, "") for facts in weights.values()) if here else ()
            key = (kind, places, tuple(facts.n_bytes for facts in counted))
            found.append(self._variant(key, index, {facts.name: moved[facts.name] for facts in here}))
        return tuple(found)

    def outside(self, overrides: tuple[TensorOverride, ...]) -> int:
        """Return the number of the variant of what is in no layer."""
        moved = self.moved(overrides)
        here = {facts.name: moved[facts.name] for facts in self.outer.values() if facts.name in moved}
        return self._variant(("outer", *here.items()), -1, here)

    def _variant(self, key: object, layer: int, moved: Mapping[str, str]) -> int:
        found = self._numbers.setdefault(key, len(self.variants))
        if found == len(self.variants):
            self.variants.append(Variant(layer, moved))
        return found

    def moved(self, overrides: tuple[TensorOverride, ...]) -> dict[str, str]:
        """Return the memories of weights that overrides take somewhere, by name."""
        return {name: memory_of(device) for name, device in self._homes.devices(overrides).items()}

    @property
    def n_trunk(self) -> int:
        return len(self.layers)


def _weights_of(model: ModelFile, source: int, index: int, part: str) -> Weights:
    """Return the weights of the layer at `index`, which has those of the block `source` but scales of its own, if it is
    in the file."""
    found = block_weights(model.blocks[source], part)
    if source == index or index >= len(model.blocks):
        return found
    scales = block_weights(model.blocks[index], part)
    kept = {stem: facts for stem, facts in found.items() if not stem.endswith(".scale")}
    return kept | {stem: facts for stem, facts in scales.items() if stem.endswith(".scale")}


def _count_layers(model: ModelFile, part: str, n_layers: int) -> int:
    """Return how many layers a part of the model has: no more than `n_layers`, which have a cache."""
    count = number(model, "decoder_block_count", n_layers) if part == "dec" else n_layers
    if count > n_layers:
        raise MissingNumberError(f"{model.architecture}.decoder_block_count is {count}, more than block_count")
    return count


def _units(silent: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield layers with those before them that leave all of their nodes to the next layer."""
    first = 0
    for index, is_silent in enumerate(silent):
        if not is_silent:
            yield first, index
            first = index + 1


_MOST_GRAPHS = 16
"""A drag over devices of several sorts needs a graph for each step."""


class SectionMaker:
    """Makes sections. `pinned`: norms are pinned to the device of their layer; `op_offload`: devices compute operations
    whose weights are on the host."""

    def __init__(
        self,
        tables: GraphTables,
        batch: Batch,
        *,
        pinned: bool,
        op_offload: bool,
    ) -> None:
        self.tables = tables
        self._batch = batch
        self._pinned = pinned
        self._op_offload = op_offload
        self._known: dict[SectionName, Section] = {}
        self._parts: dict[tuple[tuple[TensorOverride, ...], tuple[int, ...]], tuple[Section, ...]] = {}

    def sizes_matter(self, memory: str, left_out: int) -> Sizes:
        """Return whose bytes tell layers apart in this memory of devices of the sort `left_out`."""
        if not self._op_offload:
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
        variants = [self.tables.variants[number] for number in (*before, *layers)]
        memories = [memory_at(place, sort) for place, sort in enumerate(left_out)]
        home = homes_of_variants(
            {memory: variant.moved for memory, variant in zip(memories, variants, strict=False)},
            self.tables.variants[outer].moved,
            {memory: self.tables.left_out[sort] for memory, sort in zip(memories, left_out, strict=True)},
        )
        ctx = self._context(home)
        placed = [
            self._placed(variant.layer, memories[place], pin_at(place), is_last=is_last and place == len(variants) - 1)
            for place, variant in enumerate(variants)
        ]
        ends = kind == "end"
        marks = Marks(ctx.graph, {0, len(before)} if ends else {0, len(before), len(variants)})
        family, slides = self.tables.family, self.tables.slides
        build_graph(ctx, family, placed, memories[-1], sliding=slides, ends=ends, passed=marks, inside=bool(before))
        if not ctx.shared.all_inputs:
            raise FarReachError
        places = range(len(memories))
        if before:
            return marks.last(ctx.common, places, open_end=not ends)
        return marks.first(ctx.common, places)

    def parts(self, overrides: tuple[TensorOverride, ...], kernel_classes: tuple[int, ...]) -> tuple[Section, ...]:
        """Return the graph of all layers in parts, given the sort of device of each layer and of the output."""
        found = self._parts.get((overrides, kernel_classes))
        if found is None:
            if len(self._parts) >= _MOST_GRAPHS:
                self._parts.clear()
            found = self._parts[overrides, kernel_classes] = self._take_apart(overrides, kernel_classes)
        return found

    def _take_apart(
        self, overrides: tuple[TensorOverride, ...], kernel_classes: tuple[int, ...]
    ) -> tuple[Section, ...]:
        tables = self.tables
        memories = [memory_at(place, sort) for place, sort in enumerate(kernel_classes)]
        left_out = {
            memory: tables.left_out[sort] for memory, sort in zip(memories, kernel_classes, strict=True) if sort
        }
        home = homes(tables.moved(overrides), left_out)
        if tables.numbers.shares_blocks:
            home = in_their_blocks(home, memories)
        ctx = self._context(home)
        last = tables.n_trunk - 1
        placed = [
            self._placed(index, memories[index], pin_at(index), is_last=index == last, home=memories[source])
            for index, source in enumerate(tables.sources)
        ]
        starts: list[tuple[int, int]] = []
        build_graph(
            ctx,
            tables.family,
            placed,
            memories[-1],
            sliding=tables.slides,
            passed=lambda _: starts.append((len(ctx.graph.nodes), len(ctx.graph.leafs))),
        )
        return take_apart(ctx.graph, starts[1:], ctx.common)

    def _context(self, home: HomeOf) -> GraphContext:
        tables = self.tables
        style = tables.family.style
        return GraphContext(tables.numbers, style, self._batch, tables.outer, home, ON_CPU, has_cache=tables.has_cache)

    def _placed(self, index: int, memory: str, pin: int, *, is_last: bool, home: str | None = None) -> Placed:
        tables = self.tables
        pin = pin if self._pinned else -1
        return Placed(tables.layers[index], tables.weights[index], memory, home or memory, pin, is_last, index)
