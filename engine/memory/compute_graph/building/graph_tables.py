"""What the graphs of one model are made of: its layers, their weights, and which of them are alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from engine.architectures.record import Architecture
from engine.gguf.model_file import ModelFile
from engine.layout.engine_parameters import TensorOverride
from engine.layout.unlisted_layers import count_unlisted_layers
from engine.memory.compute_graph.building.facts import Weights, block_weights, global_weights
from engine.memory.compute_graph.building.family import Family, build_graph, find_family
from engine.memory.compute_graph.building.homes import homes
from engine.memory.compute_graph.building.numbers import LayerNumbers, Numbers, read_layers, read_numbers
from engine.memory.compute_graph.building.placed import Placed
from engine.memory.compute_graph.building.sketch import Batch, Sketch
from engine.memory.compute_graph.ggml.scheduler import HOST
from engine.memory.hyper_parameters import HyperParameters, MissingNumberError, number
from engine.memory.kernels import Kernels, find_unsupported


class GraphTables:
    """What the graphs of one model are made of, whatever the context."""

    def __init__(self, model: ModelFile, hyper: HyperParameters, architecture: Architecture) -> None:
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
        self._without_kernel: dict[Kernels, frozenset[str]] = {"all": frozenset()}

    def without_kernel(self, kernels: Kernels) -> frozenset[str]:
        """Return the names of the weights that a device with these kernels leaves to the host."""
        found = self._without_kernel.get(kernels)
        if found is None:
            found = self._without_kernel[kernels] = find_unsupported(self._model, self.architecture, kernels)
        return found

    def _try_graph(self, model: ModelFile) -> None:
        """Build one layer of each kind, so that tensors which do not fit show here and not while somebody drags."""
        batch = Batch(2, 1, 2, 256, 256, 1, 1, "f16", "f16", flash=False, turned_values=True, offload_kqv=True)
        sketch = Sketch(
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
                sketch,
                self.family,
                layers,
                HOST,
                sliding=self.slides,
                passed=lambda _: counts.append(len(sketch.graph.nodes)),
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

    def alike(self, overrides: tuple[TensorOverride, ...], *, by_size: bool) -> tuple[int, ...]:
        """Return for each layer the first one that makes the same graph, with weights in the same places under
        `overrides` and, `by_size`, of the same bytes: a device that borrows weights from the host makes room for them.
        """
        known: dict[object, int] = {}
        home = homes(overrides, {})
        found = []
        for index, (kind, weights) in enumerate(zip(self.kinds, self.weights, strict=True)):
            moved = tuple(home(facts, "") for facts in weights.values()) if overrides else ()
            sizes = tuple(facts.n_bytes for facts in weights.values()) if by_size else ()
            found.append(known.setdefault((kind, moved, sizes), index))
        return tuple(found)

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
