"""Widths of the feed-forward part of each layer, read off the tensors: they are what the engine multiplies with."""

from __future__ import annotations

from dataclasses import dataclass

from engine.gguf.model_file import Block, ModelFile, TensorInfo
from engine.memory.hyper_parameters import MissingNumberError, number


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Widths of one layer's feed-forward part, in elements.

    `width` is that of one expert where `n_used` (experts per token) is not 0; `gated`: gate and up are two activations;
    `shared_width`: of the experts that every token takes.
    """

    width: int
    gated: bool
    n_used: int = 0
    shared_width: int = 0


def read_feed_forward(model: ModelFile) -> tuple[FeedForward, ...]:
    """Return the widths of every block.

    Raises:
        MissingNumberError: where tensors and header do not fit together.
    """
    return tuple(_read(model, block) for block in model.blocks)


def _read(model: ModelFile, block: Block) -> FeedForward:
    shapes = {tensor_stem(tensor): tensor.shape for tensor in block.tensors}
    shared = _rows(shapes.get("ffn_up_shexp"))
    if "ffn_up_exps" in shapes or "ffn_gate_up_exps" in shapes:
        fused = "ffn_up_exps" not in shapes
        up = shapes["ffn_gate_up_exps"] if fused else shapes["ffn_up_exps"]
        if len(up) != 3:
            raise MissingNumberError(f"the experts of block {block.index} have {len(up)} dimensions in place of 3")
        n_used = number(model, "expert_used_count")
        if n_used > up[2]:
            raise MissingNumberError(f"{model.architecture}.expert_used_count is {n_used} of {up[2]} experts")
        return FeedForward(
            width=up[1] // 2 if fused else up[1],
            gated=fused or "ffn_gate_exps" in shapes,
            n_used=n_used,
            shared_width=shared,
        )
    width = _rows(shapes.get("ffn_up"))
    gated = "ffn_gate" in shapes
    # A fused gate and up has twice the rows of what the down projection takes.
    down = (shapes.get("ffn_down") or (0,))[0]
    if not gated and width == 2 * down:
        width, gated = down, True
    return FeedForward(width=width, gated=gated, shared_width=shared)


def tensor_stem(tensor: TensorInfo) -> str:
    """Return `ffn_up` of `blk.3.ffn_up.weight`; other suffixes keep theirs so that they do not shadow the weight."""
    return tensor.name.split(".", 2)[-1].removesuffix(".weight")


def _rows(shape: tuple[int, ...] | None) -> int:
    return shape[1] if shape is not None and len(shape) > 1 else 0
