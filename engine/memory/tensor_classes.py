"""Which part of a model a tensor belongs to, as the engine's table of tensors says (`llama-arch.cpp`)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.architectures.record import Architecture
from engine.gguf.model_file import ModelFile, TensorInfo

TOKEN_EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"

# Tensors outside of blocks: input tensors stay on the CPU, rope tables go to every buffer type that holds a layer which
# turns by them, some go to the first layer, all else belongs to the output.
_INPUT = ("token_embd", "position_embd", "token_types", "per_layer_token_embd")
_ROPE = ("rope_freqs", "rope_factors_long", "rope_factors_short")
_FIRST_LAYER = ("token_embd_norm", "per_layer_model_proj", "per_layer_proj_norm", "hrm", "conv1d")
_NUMBERED = re.compile(r"(?:(?:enc|dec)\.blk|convnext|posnet)\.(\d{1,3})\.")
"""Layers of encoders, decoders and sound models, which the engine places like blocks of the same number."""
_UNUSED = re.compile(r"masked_embd_|dec\.blk\.\d+\.cross_attn_rel_b")

_LAZY = "per_layer_token_embd.weight"
_LAZY_BYTES = 1 << 32
"""Embeddings per layer that are larger stay in the file (`lazy_read::add`)."""


@dataclass(frozen=True, slots=True)
class TensorClasses:
    """Tensors by what decides their place. `lazy`: the input that the engine would rather leave in the file."""

    blocks: list[tuple[TensorInfo, ...]]
    inputs: list[TensorInfo]
    ropes: list[TensorInfo]
    outputs: list[TensorInfo]
    lazy: TensorInfo | None


def classify(model: ModelFile, architecture: Architecture | None) -> TensorClasses:
    """Return the tensors of `model` by class; those that the engine never loads are in none."""
    blocks = [block.tensors for block in model.blocks]
    inputs: list[TensorInfo] = []
    ropes: list[TensorInfo] = []
    outputs: list[TensorInfo] = []
    for tensor in model.global_tensors:
        stem = tensor.name.split(".", 1)[0]
        numbered = _NUMBERED.match(tensor.name)
        layer = int(numbered[1]) if numbered else 0
        if _UNUSED.match(tensor.name):
            continue
        if stem in _ROPE:
            ropes.append(tensor)
        elif stem in _INPUT:
            inputs.append(tensor)
        elif (numbered or _is_of_first_layer(architecture, stem)) and layer < len(blocks):
            blocks[layer] = (tensor, *blocks[layer])
        else:
            outputs.append(tensor)
    lazy = None
    if architecture is not None and architecture.reads_lazily:
        lazy = next((each for each in inputs if each.name == _LAZY and each.size_bytes > _LAZY_BYTES), None)
    return TensorClasses(blocks, inputs, ropes, outputs, lazy)


def _is_of_first_layer(architecture: Architecture | None, stem: str) -> bool:
    is_norm = architecture is not None and architecture.output_norm_in_embedding and stem == _FIRST_LAYER[0]
    return stem in _FIRST_LAYER and not is_norm


def turning_layers(model: ModelFile, architecture: Architecture | None) -> tuple[bool, ...]:
    """Return which layers come with the rope tables: all, or those that the file does not list as sliding."""
    sliding = model.hyper_parameter("attention.sliding_window_pattern")
    if architecture is None or not architecture.rope_factors_full_only or not isinstance(sliding, tuple):
        return (True,) * model.n_layers
    return tuple(index >= len(sliding) or not sliding[index] for index in range(model.n_layers))
