"""A layer on its way into the graph: its weights by short name (`llama_layer` in llama-model.h), and buffer types.

A weight is in the buffer type of its layer's device, in host memory if the device has no kernel for it, or where an
override says (`select_weight_buft` in llama-model-loader.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.devices.device import CPU_ID
from engine.model.gguf.model_file import Block, ModelFile, TensorInfo
from engine.planning.memory.compute_graph.building.hparams import LayerHparams
from engine.planning.memory.compute_graph.ggml.scheduler import HOST
from engine.planning.memory.tensors import row_padding_bytes


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """One weight: full name, shape (fastest dimension first), size in bytes, and type."""

    name: str
    ne: tuple[int, ...]
    n_bytes: int
    type_name: str

    @property
    def padding_bytes(self) -> int:
        """Bytes that backends add which pad rows."""
        return row_padding_bytes(self.type_name, self.ne[0]) if self.ne else 0


Weights = dict[str, WeightFacts]
"""Weights by short name: `attn_q` is the matrix, `attn_q.bias` its bias."""

SelectBuft = Callable[[WeightFacts, str], str]
"""Function that returns the buffer type of a weight, given the buffer type of its layer."""


def stem(name: str) -> str:
    """Return the short name: `ffn_up` for `blk.3.ffn_up.weight`, `ffn_up.bias` for `blk.3.ffn_up.bias`."""
    return name.split(".", 2)[-1].removesuffix(".weight") if name.startswith("blk.") else name.removesuffix(".weight")


def _facts(tensor: TensorInfo) -> WeightFacts:
    return WeightFacts(tensor.name, tensor.shape, tensor.size_bytes, tensor.type_name)


def block_weights(block: Block, part: str = "") -> Weights:
    """Return the weights of a block, or of one `part` of it: `dec.blk.0.attn_q` is `attn_q` of the part `dec`."""
    if not part:
        return {stem(tensor.name): _facts(tensor) for tensor in block.tensors}
    start = f"{part}.blk."
    of_part = [tensor for tensor in block.tensors if tensor.name.startswith(start)]
    return {stem(tensor.name.removeprefix(f"{part}.")): _facts(tensor) for tensor in of_part}


def global_weights(model: ModelFile) -> Weights:
    """Return the weights that are in no block."""
    return {stem(tensor.name): _facts(tensor) for tensor in model.global_tensors}


@dataclass(frozen=True, slots=True)
class Placed:
    """A layer with its place.

    `hparams`, `weights`: what it is made of.
    `buft`: buffer type of its device.
    `weights_buft`: buffer type of the block whose weights it uses; differs from `buft` only if layers share a block.
    `backend`: index of the backend that its norms are pinned to; -1 for none.
    `is_last`: it is the last layer of the model. `index`: its number in the model.
    """

    hparams: LayerHparams
    weights: Weights
    buft: str
    weights_buft: str
    backend: int
    is_last: bool
    index: int


def buft_of_device(device: str) -> str:
    """Return the buffer type of a device."""
    return HOST if device == CPU_ID else device


def weight_bufts(moved: Mapping[str, str], unsupported: Mapping[str, frozenset[str]]) -> SelectBuft:
    """Return the function that selects the buffer type of a weight.

    `moved`: buffer types that overrides move weights to, by name of the weight.
    `unsupported`: by buffer type, the names of the weights that its device has no kernel for. llama.cpp does not check
        kernels for overridden weights.
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
    """Return the function that selects the buffer type of a weight, for layers of known variants.

    `variants`: moved weights, by buffer type of the layer. `outer`: moved weights in no block. `unsupported`: see
        `weight_bufts`.
    """

    def select(facts: WeightFacts, buft: str) -> str:
        moved = variants.get(buft, {}).get(facts.name) or outer.get(facts.name)
        return moved or (HOST if facts.name in unsupported.get(buft, ()) else buft)

    return select


def in_block_bufts(select: SelectBuft, bufts: Sequence[str]) -> SelectBuft:
    """Return `select` for layers that use weights of another block: `bufts` has the buffer type of each block."""

    def found(facts: WeightFacts, buft: str) -> str:
        if facts.name.startswith("blk."):
            buft = bufts[int(facts.name.split(".", 2)[1])]
        return select(facts, buft)

    return found
