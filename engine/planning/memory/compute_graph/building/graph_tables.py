"""Tables of one model from which its graphs are built: hyper-parameters, weights and kind of each layer.

Layers of one kind have equal nodes, which are built once. A variant is the layers of one kind whose weights are also in
the same buffer types; overrides of weights make several variants of a kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

from msgspec import Struct

from engine.model.architectures.record import Architecture
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.engine_parameters import TensorOverride
from engine.planning.layout.split_modes import count_unlisted_layers
from engine.planning.memory.backends import ALL_KERNELS, Kernels, find_unsupported
from engine.planning.memory.compute_graph.building.context import Batch, GraphContext
from engine.planning.memory.compute_graph.building.graph import Family, build_graph, find_family
from engine.planning.memory.compute_graph.building.hparams import (
    LayerHparams,
    ModelHparams,
    read_layer_hparams,
    read_model_hparams,
)
from engine.planning.memory.compute_graph.building.layer import (
    LayerInstance,
    SelectBuft,
    Weights,
    block_weights,
    buft_of_device,
    global_weights,
    in_block_bufts,
    variant_weight_bufts,
    weight_bufts,
)
from engine.planning.memory.compute_graph.ggml.graph import Tensor
from engine.planning.memory.compute_graph.ggml.names import ON_CPU, buft_at, pin_at
from engine.planning.memory.compute_graph.ggml.pass_cache import SectionName
from engine.planning.memory.compute_graph.ggml.scheduler import HOST
from engine.planning.memory.compute_graph.ggml.sections import DistantReadError, LayerRecorder, Section, partition_graph
from engine.planning.memory.hyper_parameters import HyperParameters, MissingNumberError, number
from engine.planning.memory.tensors import OverrideMatches

Sizes = Literal["none", "moved", "all"]
"""Weights that must have equal sizes in all layers that share a graph: none, those moved by overrides, or all."""


class Variant(Struct, frozen=True):
    """Representative of all layers that have the same graph, with weights in the same buffer types.

    `layer`: index of one of these layers; -1 for the weights outside of blocks.
    `moved`: buffer type of each weight that is moved by an override, by full name of the weight.
    """

    layer: int
    moved: Mapping[str, str]


class GraphTables:
    """Hyper-parameters, weights and kinds of layers of one model, from which its graphs are built.

    The tables are valid for all context settings and layouts. Layers of one kind have equal nodes.
    """

    def __init__(
        self, model: ModelFile, hyper: HyperParameters, architecture: Architecture, override_homes: OverrideMatches
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
        self.hparams: ModelHparams = read_model_hparams(
            model, hyper, architecture, family.record, family.style.positions
        )
        self.layers: tuple[LayerHparams, ...] = read_layer_hparams(model, hyper, family.record, family.style.rope)
        if family.record.part:
            self.layers = self.layers[: _count_layers(model, family.record.part, len(self.layers))]
        # Looped models list their blocks once; the graph has them `n_loops` times.
        self.layers *= hyper.n_loops
        stacks = self.hparams.stacks
        self.sources: tuple[int, ...] = tuple(
            index % self.hparams.n_blocks if stacks is None else stacks.block(index)
            for index in range(len(self.layers))
        )
        self.weights: tuple[Weights, ...] = tuple(
            _weights_of(model, source, index, family.record.part) for index, source in enumerate(self.sources)
        )
        self.outer: Weights = global_weights(model)
        adds = any(layer.adds_input for layer in self.layers)
        shares = hyper.cache_of != tuple(range(hyper.n_layers)) or "per_layer_token_embd" in self.outer
        self.is_whole: bool = (
            family.record.every_layer or shares or adds or self.hparams.shares_blocks or any(hyper.indexer_widths)
        )
        """Whether the graph is built whole, because layers read tensors of layers that are not their neighbours."""
        self.slides: bool = any(layer.is_swa for layer in self.layers)
        # Layers of equal hyper-parameters and shapes make equal nodes. Types and sizes of weights do not matter here;
        # `alike` adds them if devices copy weights.
        shapes = [
            (hparams, source if stacks else 0, tuple(sorted((name, facts.ne) for name, facts in weights.items())))
            for hparams, weights, source in zip(self.layers, self.weights, self.sources, strict=True)
        ]
        known: dict[object, int] = {}
        self.kinds: tuple[int, ...] = tuple(known.setdefault(shape, len(known)) for shape in shapes)
        contents = [
            (kind, *sorted((stem, facts.n_bytes, facts.type_name) for stem, facts in weights.items()))
            for kind, weights in zip(self.kinds, self.weights, strict=True)
        ]
        self.forms: tuple[int, ...] = tuple(map(contents.index, contents))
        """For each layer, the index of the first layer with the same nodes, and weights of equal types and sizes."""
        self._try_graph(model)
        self._model = model
        self.architecture: Architecture = architecture
        self.unsupported_weights: list[frozenset[str]] = [frozenset()]
        """Full names of the weights for which devices have no kernel, by number of the kernel class.

        A kernel class is the devices that lack kernels for the same weights. Devices of class 0 have kernels for all
        weights.
        """
        self._kernel_classes: dict[Kernels, int] = {ALL_KERNELS: 0}
        self.variants: list[Variant] = []
        """All variants so far: representatives of layers with the same graph and with weights in the same buffer types.

        Methods refer to a variant by its index in this list.
        """
        self._keys: list[tuple[tuple[str, ...], tuple[object, ...]]] = []
        self._numbers: dict[tuple[tuple[str, ...], tuple[object, ...]], int] = {}
        self._homes = override_homes

    def kernel_class(self, kernels: Kernels) -> int:
        """Return the number of the kernel class of a device with these kernels.

        The devices of one kernel class lack kernels for the same weights, which llama.cpp puts in host memory.
        """
        found = self._kernel_classes.get(kernels)
        if found is None:
            names = find_unsupported(self._model, self.architecture, kernels)
            # Different kernels that leave the same weights to the host are one class, which shares its sections.
            if names not in self.unsupported_weights:
                self.unsupported_weights.append(names)
            found = self._kernel_classes[kernels] = self.unsupported_weights.index(names)
        return found

    def _try_graph(self, model: ModelFile) -> None:
        """Build one layer of each kind, so that unsuitable tensors raise an error as soon as the model is opened.

        Raises:
            MissingNumberError: the tensors of the file do not fit the architecture.
        """
        batch = Batch(2, 1, 2, 256, 256, 1, 1, "f16", "f16", flash=False, v_trans=True, offload_kqv=True)
        ctx = GraphContext(
            self.hparams, self.family.style, batch, self.outer, lambda _, buft: buft, 0, has_cache=self.has_cache
        )
        firsts = {kind: index for index, kind in reversed(list(enumerate(self.kinds)))}
        layers = [
            LayerInstance(self.layers[index], self.weights[index], HOST, HOST, -1, False, index)
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
        # Builders look up weights and divide by sizes of a file that nobody has checked, so any of these may come.
        except (ArithmeticError, LookupError, AssertionError, ValueError) as error:
            raise MissingNumberError(
                f"the tensors of the file do not make a graph of {model.architecture} ({error})"
            ) from error
        silent = {
            self.kinds[layer.index]
            for layer, (start, end) in zip(layers, pairwise(counts), strict=True)
            if start == end
        }
        self.section_layers: tuple[tuple[int, int], ...] = tuple(
            _section_layers([kind in silent for kind in self.kinds])
        )
        """(First, last) layer of each section of the graph, except the section of the output matrix.

        A layer that adds no nodes is in one section with the next layer that does.
        """

    def alike(self, overrides: tuple[TensorOverride, ...], sizes: Sizes) -> tuple[int, ...]:
        """Return the variant of each layer, as index in `variants`.

        Layers of one variant have the same graph with weights in the same buffer types. A device that computes with
        weights in host memory allocates copies of them, so the sizes of these weights must also be equal.

        `overrides`: overrides of the layout.
        `sizes`: the weights whose sizes must be equal.
        """
        moved = self.moved(overrides)
        found = []
        for index, (kind, weights) in enumerate(zip(self.kinds, self.weights, strict=True)):
            here = [facts for facts in weights.values() if facts.name in moved] if moved else []
            counted = here if sizes == "moved" else weights.values() if sizes == "all" else ()
            bufts = tuple(moved.get(facts.name, "") for facts in weights.values()) if here else ()
            rest = (kind, *(facts.n_bytes for facts in counted))
            found.append(self._variant(bufts, rest, index, {facts.name: moved[facts.name] for facts in here}))
        return tuple(found)

    def outside(self, overrides: tuple[TensorOverride, ...]) -> int:
        """Return the variant of the weights outside of blocks, as index in `variants`; it is added if it is new.

        Two lists of overrides have the same variant if they move the same of these weights to the same buffer types.
        """
        moved = self.moved(overrides)
        here = {facts.name: moved[facts.name] for facts in self.outer.values() if facts.name in moved}
        return self._variant(tuple(here.values()), ("outer", *here), -1, here)

    def renamed(self, number: int, names: Mapping[str, str]) -> int:
        """Return the variant that differs from variant `number` only in the names of buffer types.

        A variant represents layers with the same graph, and is given as index in `variants`.

        `names`: new name of a buffer type by its old name.
        """
        moved = self.variants[number].moved
        if names.keys().isdisjoint(moved.values()):
            return number
        bufts, rest = self._keys[number]
        here = {weight: names.get(buft, buft) for weight, buft in moved.items()}
        return self._variant(tuple([names.get(buft, buft) for buft in bufts]), rest, self.variants[number].layer, here)

    def _variant(self, bufts: tuple[str, ...], rest: tuple[object, ...], layer: int, moved: Mapping[str, str]) -> int:
        """Return the index in `variants` of the variant with the key (`bufts`, `rest`); it is added if it is new.

        A variant represents layers with the same graph, and with weights in the same buffer types.

        `bufts`: buffer type of each weight that is moved by an override; "" for other weights.
        `rest`: for a layer, its kind and the sizes of weights that must be equal; for weights outside of blocks, the
        names of the moved ones.
        `layer`, `moved`: fields of a new `Variant`.
        """
        found = self._numbers.setdefault((bufts, rest), len(self.variants))
        if found == len(self.variants):
            self.variants.append(Variant(layer, moved))
            self._keys.append((bufts, rest))
        return found

    def moved(self, overrides: tuple[TensorOverride, ...]) -> dict[str, str]:
        """Return the new buffer type of each weight that is moved by an override, by full name of the weight."""
        return {name: buft_of_device(device) for name, device in self._homes.devices(overrides).items()}

    @property
    def n_trunk(self) -> int:
        return len(self.layers)


def _weights_of(model: ModelFile, source: int, index: int, part: str) -> Weights:
    """Return the weights of layer `index` in the graph, by short name.

    The weights are from block `source`. Only `.scale` tensors are from block `index`, if the file has this block.

    `part`: "enc" or "dec" for the weights of encoder or decoder only; empty for all.
    """
    found = block_weights(model.blocks[source], part)
    if source == index or index >= len(model.blocks):
        return found
    scales = block_weights(model.blocks[index], part)
    kept = {stem: facts for stem, facts in found.items() if not stem.endswith(".scale")}
    return kept | {stem: facts for stem, facts in scales.items() if stem.endswith(".scale")}


def _count_layers(model: ModelFile, part: str, n_layers: int) -> int:
    """Return the number of layers in a part of the model ("enc" or "dec").

    Raises:
        MissingNumberError: `decoder_block_count` in the file is above `n_layers`.
    """
    count = number(model, "decoder_block_count", n_layers) if part == "dec" else n_layers
    if count > n_layers:
        raise MissingNumberError(f"{model.architecture}.decoder_block_count is {count}, more than block_count")
    return count


def _section_layers(silent: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) layer of each section (the nodes of one layer).

    A layer without nodes is in the section of the next layer that has nodes.

    `silent`: for each layer, True if it adds no nodes to the graph.
    """
    first = 0
    for index, is_silent in enumerate(silent):
        if not is_silent:
            yield first, index
            first = index + 1


_MOST_GRAPHS = 16
"""Largest number of whole graphs that are cached.

In a drag each change may need another graph, if devices lack kernels for different weights.
"""


class _WholeGraph:
    """A graph that is built once, without overrides. `with_moved` returns its sections for layouts with overrides.

    A section is consecutive nodes, mostly those of one layer. Overrides change only the buffer types of weights.
    Overrides of weights outside of blocks are not supported.
    If two layouts place the weights of a section alike, both get the same object, so that results that are cached for
    it are found again.

    `sections`: the sections without overrides.
    `names`: full name of each weight in the sections.
    """

    def __init__(self, sections: tuple[Section, ...], names: Mapping[Tensor, str]) -> None:
        self._sections = sections
        self._names = tuple(
            tuple((number, names[tensor]) for number, tensor in enumerate(section.tensors) if tensor in names)
            for section in sections
        )
        self._variants: dict[tuple[int, tuple[tuple[int, str], ...]], Section] = {}

    def with_moved(self, moved: Mapping[str, str]) -> tuple[Section, ...]:
        """Return the sections (the nodes of one layer each) with the weights in `moved` in other buffer types.

        `moved`: new buffer type of each moved weight, by full name of the weight.
        """
        return tuple(
            self._variant(number, tuple([(index, moved[name]) for index, name in names if name in moved]))
            for number, names in enumerate(self._names)
        )

    def _variant(self, number: int, bufts: tuple[tuple[int, str], ...]) -> Section:
        if not bufts:
            return self._sections[number]
        found = self._variants.get((number, bufts))
        if found is None:
            found = self._sections[number].with_bufts(bufts)
            if len(self._variants) >= _MOST_VARIANTS:
                self._variants.clear()
            self._variants[number, bufts] = found
        return found


_MOST_VARIANTS = 4096
"""Largest number of cached sections with weights that overrides move."""


PlacedWeight = tuple[int, int, str]
"""A weight of a layer in a section: (index of its tensor, number of the layer in the section, short name)."""


class SectionMaker:
    """Builds sections of a graph (consecutive nodes, mostly those of one layer) and caches them.

    `section` builds a section alone. If layers read tensors of layers that are not their neighbours, `parts` builds the
    whole graph and cuts it.

    `pinned`: whether norms are pinned to the device of their layer.
    `op_offload`: whether devices compute with weights in host memory.
    """

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
        self._plain: dict[SectionName, tuple[Section, tuple[PlacedWeight, ...]]] = {}
        self._parts: dict[tuple[tuple[TensorOverride, ...], tuple[int, ...]], tuple[Section, ...]] = {}
        self._whole_graphs: dict[tuple[int, ...], _WholeGraph] = {}

    def sizes_matter(self, buft: str, kernel_class: int) -> Sizes:
        """Return which weights must have equal sizes in all layers that use the same section (nodes) of the graph.

        A device that computes with weights in host memory allocates copies of them, so their sizes matter. The result
        "moved" stands for the weights that overrides move.

        `buft`: buffer type of the device on which the layers are.
        `kernel_class`: number of the device's kernel class (`GraphTables.kernel_class`).
        """
        if not self._op_offload:
            return "none"
        return "all" if kernel_class or buft == HOST else "moved"

    def section(self, name: SectionName) -> Section:
        """Return the section with this name; it is built on first use.

        A section is consecutive nodes of the graph, mostly those of one layer. A kernel class is the devices that lack
        kernels for the same weights. A name is `(kind, before, layers, kernel_classes, is_last, outer)`.

        `kind`: "layers", or "end" for the section with the output matrix.
        `before`, `layers`: variants of the layers of the previous section and of this one (indices in
        `GraphTables.variants`); `before` is empty for the first section.
        `kernel_classes`: number of the kernel class of each layer's device; the last one is for the output layer.
        `is_last`: whether the last of the layers is the model's last one.
        `outer`: variant of the weights outside of blocks.

        Raises:
            DistantReadError: a layer reads a tensor of a layer that is not its neighbour.
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
        kernel_classes: tuple[int, ...],
        is_last: bool,
        outer: int,
    ) -> Section:
        variants = [self.tables.variants[number] for number in (*before, *layers)]
        forms = tuple([self.tables.forms[variant.layer] for variant in variants])
        bufts = [buft_at(number, kernel_class) for number, kernel_class in enumerate(kernel_classes)]
        select_buft = variant_weight_bufts(
            {buft: variant.moved for buft, variant in zip(bufts, variants, strict=False)},
            self.tables.variants[outer].moved,
            {
                buft: self.tables.unsupported_weights[kernel_class]
                for buft, kernel_class in zip(bufts, kernel_classes, strict=True)
            },
        )
        # Overrides of weights in blocks change only buffer types, so the nodes are made once.
        key = (kind, forms[: len(before)], forms[len(before) :], kernel_classes, is_last, outer)
        found = self._plain.get(key)
        if found is None:
            found = self._plain[key] = self._build(kind, len(before), variants, bufts, select_buft, is_last=is_last)
        section, weights = found
        chosen = [
            (number, select_buft(self.tables.weights[variants[position].layer][stem], bufts[position]))
            for number, position, stem in weights
        ]
        moved = [(number, buft) for number, buft in chosen if section.tensors[number].buft != buft]
        return section.with_bufts(moved) if moved else section

    def _build(
        self,
        kind: str,
        n_before: int,
        variants: Sequence[Variant],
        bufts: Sequence[str],
        select_buft: SelectBuft,
        *,
        is_last: bool,
    ) -> tuple[Section, tuple[PlacedWeight, ...]]:
        """Build a section of the graph (mostly the nodes of one layer); return it and its weights.

        `kind`: "layers", or "end" for the section with the output matrix.
        `variants`: the variants of the previous section's layers, followed by those of this section's layers.
        `n_before`: number of layers in the previous section; 0 for the first section.
        `bufts`: buffer type of each layer's device; the last one is for the output layer.
        `select_buft`: function that chooses the buffer type of a weight.
        `is_last`: whether the last of the layers is the model's last one.
        """
        ctx = self._context(select_buft)
        placed = [
            self._placed(variant.layer, bufts[number], pin_at(number), is_last=is_last and number == len(variants) - 1)
            for number, variant in enumerate(variants)
        ]
        ends = kind == "end"
        marks = LayerRecorder(ctx.graph, {0, n_before} if ends else {0, n_before, len(variants)})
        family, slides = self.tables.family, self.tables.slides
        build_graph(ctx, family, placed, bufts[-1], sliding=slides, ends=ends, passed=marks, inside=bool(n_before))
        if not ctx.shared.all_inputs:
            raise DistantReadError
        numbers = range(len(bufts))
        section = marks.last(ctx.common, numbers, open_end=not ends) if n_before else marks.first(ctx.common, numbers)
        owners = ctx.weight_owners
        found = ((number, owners.get(tensor)) for number, tensor in enumerate(section.tensors))
        return section, tuple([(number, *owner) for number, owner in found if owner is not None])

    def parts(self, overrides: tuple[TensorOverride, ...], kernel_classes: tuple[int, ...]) -> tuple[Section, ...]:
        """Build the whole graph, cut it into sections (consecutive nodes, mostly one layer's), and return all of them.

        `kernel_classes`: number of the kernel class of each layer's device; the last one is for the output layer. The
        devices of one class lack kernels for the same weights.
        """
        found = self._parts.get((overrides, kernel_classes))
        if found is None:
            if len(self._parts) >= _MOST_GRAPHS:
                self._parts.clear()
            found = self._parts[overrides, kernel_classes] = self._make_parts(overrides, kernel_classes)
        return found

    def _make_parts(
        self, overrides: tuple[TensorOverride, ...], kernel_classes: tuple[int, ...]
    ) -> tuple[Section, ...]:
        moved = self.tables.moved(overrides)
        if any(facts.name in moved for facts in self.tables.outer.values()):
            # A graph has the RoPE factors once for each buffer type, so that moving them changes more than their place.
            return self._partition(overrides, kernel_classes)[0]
        graph = self._whole_graphs.get(kernel_classes)
        if graph is None:
            if len(self._whole_graphs) >= _MOST_GRAPHS:
                self._whole_graphs.clear()
            graph = self._whole_graphs[kernel_classes] = _WholeGraph(*self._partition((), kernel_classes))
        return graph.with_moved(moved)

    def _partition(
        self, overrides: tuple[TensorOverride, ...], kernel_classes: tuple[int, ...]
    ) -> tuple[tuple[Section, ...], Mapping[Tensor, str]]:
        """Build the whole graph; return its sections and the full names of their weights.

        A section is consecutive nodes, mostly those of one layer.
        """
        tables = self.tables
        bufts = [buft_at(number, kernel_class) for number, kernel_class in enumerate(kernel_classes)]
        unsupported = {
            buft: tables.unsupported_weights[kernel_class]
            for buft, kernel_class in zip(bufts, kernel_classes, strict=True)
            if kernel_class
        }
        select_buft = weight_bufts(tables.moved(overrides), unsupported)
        if tables.hparams.shares_blocks:
            select_buft = in_block_bufts(select_buft, bufts)
        ctx = self._context(select_buft)
        last = tables.n_trunk - 1
        placed = [
            self._placed(index, bufts[index], pin_at(index), is_last=index == last, weights_buft=bufts[source])
            for index, source in enumerate(tables.sources)
        ]
        starts: list[tuple[int, int]] = []
        build_graph(
            ctx,
            tables.family,
            placed,
            bufts[-1],
            sliding=tables.slides,
            passed=lambda _: starts.append((len(ctx.graph.nodes), len(ctx.graph.leafs))),
        )
        # The first start is left out: the embeddings and layer 0 are one section.
        return partition_graph(ctx.graph, starts[1:], ctx.common), ctx.weight_names

    def _context(self, select_buft: SelectBuft) -> GraphContext:
        tables = self.tables
        style = tables.family.style
        return GraphContext(
            tables.hparams, style, self._batch, tables.outer, select_buft, ON_CPU, has_cache=tables.has_cache
        )

    def _placed(
        self, index: int, buft: str, pin: int, *, is_last: bool, weights_buft: str | None = None
    ) -> LayerInstance:
        tables = self.tables
        pin = pin if self._pinned else -1
        return LayerInstance(
            tables.layers[index], tables.weights[index], buft, weights_buft or buft, pin, is_last, index
        )
