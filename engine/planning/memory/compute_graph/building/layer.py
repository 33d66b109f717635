"""A layer on its way into the graph: its weights by short name (`llama_layer` in llama-model.h), and memories.

A weight lies in its layer's memory, in the host's if the device has no kernel for it, or in an override's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.devices.device import CPU_ID
from engine.model.gguf.model_file import Block, ModelFile, TensorInfo
from engine.planning.memory.compute_graph.building.hparams import LayerNumbers
from engine.planning.memory.compute_graph.ggml.scheduler import HOST
from engine.planning.memory.tensors import row_padding_bytes


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """Shape (fastest first), bytes and full name of one weight."""

    name: str
    ne: tuple[int, ...]
    n_bytes: int
    type_name: str

    @property
    def padding_bytes(self) -> int:
        """What backends that pad rows add."""
        return row_padding_bytes(self.type_name, self.ne[0]) if self.ne else 0


Weights = dict[str, WeightFacts]
"""`attn_q` -> the weight, `attn_q.bias` -> its bias."""

HomeOf = Callable[[WeightFacts, str], str]
"""Memory of a weight, given the memory that its layer would give it."""


def stem(name: str) -> str:
    """Return `ffn_up` of `blk.3.ffn_up.weight`, `ffn_up.bias` of `blk.3.ffn_up.bias`."""
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
    """Return the weights outside of blocks."""
    return {stem(tensor.name): _facts(tensor) for tensor in model.global_tensors}


@dataclass(frozen=True, slots=True)
class Placed:
    """`memory` of its device; `home`: of the block whose weights it has, mostly the same; `backend` that its norms are
    pinned to (-1: none); `index` among the layers of the model."""

    numbers: LayerNumbers
    weights: Weights
    memory: str
    home: str
    backend: int
    is_last: bool
    index: int


def memory_of(device: str) -> str:
    """Return the memory of a device."""
    return HOST if device == CPU_ID else device


def homes(moved: Mapping[str, str], left_out: Mapping[str, frozenset[str]]) -> HomeOf:
    """Return what tells the memory of a weight, given that of its layer.

    `moved`: the memories that overrides take weights to, by name; `left_out`: by memory, the names of the weights that
    its device has no kernel for; overrides do not ask for one.
    """
    if not moved and not left_out:
        return lambda _, memory: memory

    def home(facts: WeightFacts, memory: str) -> str:
        found = moved.get(facts.name)
        return found or (HOST if facts.name in left_out.get(memory, ()) else memory)

    return home


def homes_of_variants(
    variants: Mapping[str, Mapping[str, str]], outer: Mapping[str, str], left_out: Mapping[str, frozenset[str]]
) -> HomeOf:
    """Return the same for layers whose weights are known to be moved, given those by the memory of each layer, and
    those of what is in no layer."""

    def home(facts: WeightFacts, memory: str) -> str:
        moved = variants.get(memory, {}).get(facts.name) or outer.get(facts.name)
        return moved or (HOST if facts.name in left_out.get(memory, ()) else memory)

    return home


def in_their_blocks(home: HomeOf, memories: Sequence[str]) -> HomeOf:
    """Return the same for layers that use the weights of other blocks, which lie where those are (`memories`)."""

    def found(facts: WeightFacts, memory: str) -> str:
        if facts.name.startswith("blk."):
            memory = memories[int(facts.name.split(".", 2)[1])]
        return home(facts, memory)

    return found
