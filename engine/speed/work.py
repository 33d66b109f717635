"""What a token reads of a model, by layer and type of weights: tables that each model needs once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from engine.gguf.model_file import ModelFile, TensorInfo, part_of_tensor
from engine.layout.engine_parameters import tensor_overrides
from engine.layout.layout import Layout, Override
from engine.layout.patterns import pattern_finder
from engine.layout.split_modes import count_unlisted_layers

_ACTIVATION_BYTES = 4
_OPS_PER_TENSOR = 2
_OPS_PER_LAYER = 4
"""Computations of a layer: two for each of its tensors and some without; counted in llama.cpp's graphs within 15 %."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What overrides take to `device`, as sums over the layers before each: bytes by type, those that a token reads
    (`weights`) and those that many tokens read together (`whole`), and layers that anything is taken of."""

    device: str
    weights: Mapping[str, Sequence[float]]
    whole: Mapping[str, Sequence[float]]
    layers: Sequence[float]

    def between(self, first: int, last: int) -> Iterator[tuple[str, float]]:
        """Yield types and bytes of what a token reads of what is taken of layers `first` to `last`."""
        return _between(self.weights, first, last)

    def whole_bytes(self, type_name: str, first: int, last: int) -> float:
        """Return the bytes of a type that are taken of these layers, all experts included."""
        sums = self.whole[type_name]
        return sums[last + 1] - sums[first]

    def count(self, first: int, last: int) -> int:
        """Return of how many of these layers something is taken."""
        return int(self.layers[last + 1] - self.layers[first])


class Work:
    """What a token costs in each layer; sums over runs of layers take no longer than a few look-ups.

    `types` are those of the weights, the one with most bytes first. For one thread at a time.
    """

    def __init__(self, model: ModelFile) -> None:
        self.model = model
        self.n_layers = model.n_layers
        self.expert_share = _expert_share(model)
        width, vocabulary = (_number(model, "embedding_length"), _vocabulary(model))
        self.hop_bytes = _ACTIVATION_BYTES * width
        self.logits_bytes = _ACTIVATION_BYTES * vocabulary
        idle = _number(model, "nextn_predict_layers")
        """Layers for guessing ahead are the last ones; a plain answer does not compute them."""
        self._repeats = 1 + count_unlisted_layers(model) // max(1, model.n_layers)
        rows: dict[str, list[float]] = {}
        whole: dict[str, list[float]] = {}
        self.weights_in_byte: dict[str, float] = {}
        """How many weights of a type are in a byte."""
        ops = [0] * self.n_layers
        for block in model.blocks[: max(1, self.n_layers - idle)]:
            ops[block.index] = self._repeats * (_OPS_PER_TENSOR * len(block.tensors) + _OPS_PER_LAYER)
            for tensor in block.tensors:
                row = rows.setdefault(tensor.type_name, [0.0] * self.n_layers)
                row[block.index] += self.read_bytes(tensor)
                row = whole.setdefault(tensor.type_name, [0.0] * self.n_layers)
                row[block.index] += tensor.size_bytes * self._repeats
                self.weights_in_byte[tensor.type_name] = prod(tensor.shape) / max(1, tensor.size_bytes)
        self.types = tuple(sorted(rows, key=lambda name: -sum(rows[name])))
        self._weights = {name: _sums(rows[name]) for name in self.types}
        self._whole = {name: _sums(whole[name]) for name in self.types}
        self._ops = _sums(ops)
        self.output = _output_of(model)
        self._caches: tuple[Sequence[int], list[float]] = ((), [0.0])
        self._moved: dict[tuple[Override, ...], tuple[Moved, ...]] = {}

    def read_bytes(self, tensor: TensorInfo) -> float:
        """Return what a token reads of a tensor in a layer: of experts those that are used."""
        share = self.expert_share if part_of_tensor(tensor.name) == "experts" else 1.0
        return tensor.size_bytes * share * self._repeats

    def weights(self, first: int, last: int) -> Iterator[tuple[str, float]]:
        """Yield types and bytes of the weights that layers `first` to `last` read."""
        return _between(self._weights, first, last)

    def whole_bytes(self, type_name: str, first: int, last: int) -> float:
        """Return the bytes of weights of a type in layers `first` to `last`, all experts included."""
        sums = self._whole[type_name]
        return sums[last + 1] - sums[first]

    def ops(self, first: int, last: int) -> float:
        """Return how many computations layers `first` to `last` are."""
        return self._ops[last + 1] - self._ops[first]

    def caches(self, kv_bytes: Sequence[int], first: int, last: int) -> float:
        """Return the bytes of full caches of these layers; `kv_bytes`, of each layer, is one value for many calls."""
        if self._caches[0] is not kv_bytes:
            self._caches = (kv_bytes, _sums(kv_bytes))
        sums = self._caches[1]
        return sums[last + 1] - sums[first]

    def moved(self, layout: Layout) -> tuple[Moved, ...]:
        """Return what overrides take from layers, wherever those are; the first one that finds a tensor decides."""
        if not layout.overrides:
            return ()
        found = self._moved.get(layout.overrides)
        if found is None:
            self._moved = {layout.overrides: (found := tuple(self._find_moved(layout)))}
        return found

    def _find_moved(self, layout: Layout) -> Iterator[Moved]:
        rules = [(pattern_finder(rule.pattern), rule.device) for rule in tensor_overrides(layout)]
        found: dict[str, dict[str, list[float]]] = {}
        whole: dict[str, dict[str, list[float]]] = {}
        layers: dict[str, list[float]] = {}
        for block in self.model.blocks:
            for tensor in block.tensors:
                device = next((device for finds, device in rules if finds(tensor.name)), None)
                if device is not None:
                    row = found.setdefault(device, {}).setdefault(tensor.type_name, [0.0] * self.n_layers)
                    row[block.index] += self.read_bytes(tensor)
                    row = whole.setdefault(device, {}).setdefault(tensor.type_name, [0.0] * self.n_layers)
                    row[block.index] += tensor.size_bytes * self._repeats
                    layers.setdefault(device, [0.0] * self.n_layers)[block.index] = 1.0
        for device, rows in found.items():
            yield Moved(device, _all_sums(rows), _all_sums(whole[device]), _sums(layers[device]))


def _between(table: Mapping[str, Sequence[float]], first: int, last: int) -> Iterator[tuple[str, float]]:
    for name, sums in table.items():
        size = sums[last + 1] - sums[first]
        if size:
            yield name, size


def _sums(values: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(values)]


def _all_sums(rows: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    return {name: _sums(row) for name, row in rows.items()}


def _number(model: ModelFile, key: str) -> int:
    value = model.hyper_parameter(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _expert_share(model: ModelFile) -> float:
    used, count = (_number(model, f"expert_{key}") for key in ("used_count", "count"))
    return used / count if 0 < used <= count else 1.0


def _vocabulary(model: ModelFile) -> int:
    tensor = _output_tensor(model)
    return tensor.shape[-1] if tensor is not None else 0


def _output_of(model: ModelFile) -> Mapping[str, float]:
    tensor = _output_tensor(model)
    return {} if tensor is None else {tensor.type_name: float(tensor.size_bytes)}


def _output_tensor(model: ModelFile) -> TensorInfo | None:
    """Return the matrix of the output layer; where there is none of its own it is the token embedding once more."""
    named = {tensor.name: tensor for tensor in model.tensors if tensor.name in ("output.weight", "token_embd.weight")}
    return named.get("output.weight") or named.get("token_embd.weight")
