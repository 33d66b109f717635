"""Sorts the tensors of a model into its repeating blocks, and those of a block into parts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from engine.gguf.model_file import Block, TensorInfo, TensorPart

_BLOCK_NAME = re.compile(r"(?:enc\.|dec\.)?blk\.(\d{1,9})\.(.+)", re.ASCII | re.DOTALL)

PART_PATTERNS: tuple[tuple[TensorPart, str], ...] = (
    ("experts", r"ffn_(gate|up|down|gate_up)_(ch)?exps\.|ffn_(gate|up|down)\.\d+\."),
    ("ffn", r"ffn|post_ffw|pre_ffw|exp_probs|channel_mix|hc_ffn|vis_(gate|down|up)"),
    ("attention", r"(cross_|vis_|post_)?attn|post_attention|layer_output_norm|indexer|hc_attn|ssm|time_mix|shortconv"),
)
"""Matched at the start of the name behind `blk.N.`; the first match wins. Regexes that Python and ECMAScript share."""
_PART_RULES = tuple((part, re.compile(pattern)) for part, pattern in PART_PATTERNS)


def block_index(name: str) -> int | None:
    """Return the number of the block a tensor belongs to, None for the others."""
    match = _BLOCK_NAME.fullmatch(name)
    return int(match[1]) if match else None


def part_of_tensor(name: str) -> TensorPart:
    """Return the part of its block a tensor belongs to: recurrent tensors and the norms before and behind attention
    count as attention, routers and shared experts as ffn (they are used for every token)."""
    match = _BLOCK_NAME.fullmatch(name)
    if match is None:
        return "other"
    return next((part for part, pattern in _PART_RULES if pattern.match(match[2])), "other")


def group_blocks(tensors: Iterable[TensorInfo], n_blocks: int) -> tuple[tuple[Block, ...], tuple[TensorInfo, ...]]:
    """Return the blocks and the tensors outside of them. All block numbers are below `n_blocks`."""
    members: list[list[TensorInfo]] = [[] for _ in range(n_blocks)]
    outside: list[TensorInfo] = []
    for tensor in tensors:
        index = block_index(tensor.name)
        (outside if index is None else members[index]).append(tensor)
    return tuple(_block(index, tuple(inside)) for index, inside in enumerate(members)), tuple(outside)


def _block(index: int, tensors: tuple[TensorInfo, ...]) -> Block:
    part_bytes: dict[TensorPart, int] = {"attention": 0, "ffn": 0, "experts": 0, "other": 0}
    for tensor in tensors:
        part_bytes[part_of_tensor(tensor.name)] += tensor.size_bytes
    return Block(index, tensors, part_bytes["attention"], part_bytes["ffn"], part_bytes["experts"], part_bytes["other"])
