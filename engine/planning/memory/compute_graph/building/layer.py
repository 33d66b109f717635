"""A layer's weights by short name (`llama_layer` in llama-model.h), and the choice of their buffer types.

A weight is in the buffer type of its layer's device. It is in host memory if the device has no kernel for it, and an
override can put it elsewhere (`select_weight_buft` in llama-model-loader.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from engine.devices.device import CPU_ID
from engine.model.gguf.model_file import Block, ModelFile, TensorInfo
from engine.planning.memory.compute_graph.building.hparams import LayerHparams
from engine.planning.memory.compute_graph.ggml.scheduler import HOST
from engine.planning.memory.tensors import row_padding_bytes


class WeightFacts(Struct, frozen=True):
    """One weight: full name, shape with the fastest dimension first, size in bytes, and tensor type."""

    name: str
    ne: tuple[int, ...]
    n_bytes: int
    type_name: str

    @property
    def padding_bytes(self) -> int:
        """Bytes that backends with row padding (`ROW_PADDING`) add to the weight."""
        return row_padding_bytes(self.type_name, self.ne[0]) if self.ne else 0


Weights = dict[str, WeightFacts]
"""Weights by short name: `attn_q` is the matrix, `attn_q.bias` its bias."""

SelectBuft = Callable[[WeightFacts, str], str]
"""Function that returns the buffer type of a weight, given the buffer type of its layer."""


def stem(name: str) -> str:
    """Return the short name of a tensor: `ffn_up` for `blk.3.ffn_up.weight`, `ffn_up.bias` for `blk.3.ffn_up.bias`."""
    return name.split(".", 2)[-1].removesuffix(".weight") if name.startswith("blk.") else name.removesuffix(".weight")


def _facts(tensor: TensorInfo) -> WeightFacts:
    return WeightFacts(tensor.name, tensor.shape, tensor.size_bytes, tensor.type_name)


def block_weights(block: Block, part: str = "") -> Weights:
    """Return the weights of a block by short name; if `part` is given, only its weights.

    `dec.blk.0.attn_q` is `attn_q` of the part `dec`.
    """
    if not part:
        return {stem(tensor.name): _facts(tensor) for tensor in block.tensors}
    start = f"{part}.blk."
    of_part = [tensor for tensor in block.tensors if tensor.name.startswith(start)]
    return {stem(tensor.name.removeprefix(f"{part}.")): _facts(tensor) for tensor in of_part}


def global_weights(model: ModelFile) -> Weights:
    """Return the weights outside of blocks by short name, such as `output_norm` for `output_norm.weight`."""
    return {stem(tensor.name): _facts(tensor) for tensor in model.global_tensors}


class LayerInstance(Struct, frozen=True):
    """A layer of the graph, with the buffer types of its weights.

    `hparams`, `weights`: its hyper-parameters and weights.
    `buft`: buffer type of its device.
    `weights_buft`: buffer type for its weights. It differs from `buft` only if several layers use one block's weights.
    `backend`: index of the backend to which its norms are pinned; -1 for none.
    `is_last`: whether it is the last layer of the model.
    `index`: its number in the model.
    """

    hparams: LayerHparams
    weights: Weights
    buft: str
    weights_buft: str
    backend: int
    is_last: bool
    index: int


def buft_of_device(device: str) -> str:
    """Return the name of a device's buffer type: `HOST` for the CPU, else the device id."""
    return HOST if device == CPU_ID else device


def weight_bufts(moved: Mapping[str, str], unsupported: Mapping[str, frozenset[str]]) -> SelectBuft:
    """Return a function that takes a weight and the buffer type of its layer, and returns the weight's buffer type.

    If an override moves the weight, it is the override's buffer type, since llama.cpp then does not check kernels. If
    the layer's device has no kernel for the weight, it is `HOST`. Otherwise it is the buffer type of the layer.

    `moved`: buffer type of each weight that overrides move, by full name of the weight.
    `unsupported`: full names of the weights for which a device has no kernel, by buffer type of the device.
    """
    if not moved and not unsupported:
        return lambda _, buft: buft

    def select(facts: WeightFacts, buft: str) -> str:
        found = moved.get(facts.name)
        return found or (HOST if facts.name in unsupported.get(buft, ()) else buft)

    return select


def variant_weight_bufts(
    variants: Mapping[str, Mapping[str, str]], outer: Mapping[str, str], unsupported: Mapping[str, frozenset[str]]
) -> SelectBuft:
    """Return a function that takes a weight and the buffer type of its layer, and returns the weight's buffer type.

    Unlike with `weight_bufts`, each layer can have overrides of its own.

    `variants`: overrides of each layer, by the layer's buffer type. A layer's overrides are the new buffer type of each
    moved weight, by full name of the weight.
    `outer`: buffer type of each moved weight outside of blocks, by full name of the weight.
    `unsupported`: full names of the weights for which a device has no kernel, by buffer type of the device.
    """

    def select(facts: WeightFacts, buft: str) -> str:
        moved = variants.get(buft, {}).get(facts.name) or outer.get(facts.name)
        return moved or (HOST if facts.name in unsupported.get(buft, ()) else buft)

    return select


def in_block_bufts(select: SelectBuft, bufts: Sequence[str]) -> SelectBuft:
    """Return a function that chooses the buffer types of weights in looped models, whose layers share blocks.

    A weight is on the device of its block, even if the layer that reads it is on another device.

    `select`: function that chooses the buffer type from a weight and the buffer type of a device.
    `bufts`: buffer type of each block's device.
    """

    def found(facts: WeightFacts, buft: str) -> str:
        if facts.name.startswith("blk."):
            buft = bufts[int(facts.name.split(".", 2)[1])]
        return select(facts, buft)

    return found
