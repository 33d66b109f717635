"""What a model file tells about one block of the graph: shapes and sizes of its weights by short name."""

from __future__ import annotations

from dataclasses import dataclass

from engine.gguf.model_file import Block, ModelFile, TensorInfo
from engine.memory.weights import row_padding_bytes


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
