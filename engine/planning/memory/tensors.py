"""Tensors of a model: their size in a buffer, the layer or part that each belongs to, and overrides that move tensors.

Mirrors `ggml_backend_buft_get_alloc_size`, the table of tensors in llama-arch.cpp, and `tensor_buft_overrides`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from engine.model.architectures.record import Architecture
from engine.model.gguf.model_file import ModelFile, TensorInfo
from engine.model.gguf.tensor_table import TYPES_BY_NAME
from engine.planning.layout.engine_parameters import TensorOverride
from engine.planning.layout.patterns import pattern_finder
from engine.planning.layout.row_mode import rows_of_members
from engine.planning.memory.backends import ROW_PADDING, SizeRule
from engine.planning.memory.kv_cache import pad

REPACKED_TYPES = frozenset({"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"})
"""Types that the CPU backend repacks on x86-64 with AVX2 (`ggml_repack_get_optimal_repack_type`)."""

_EXPERTS = "exps."
_NO_SPAN = (1 << 62, 0)


def tensor_bytes(tensor: TensorInfo, rule: SizeRule) -> int:
    """Return the bytes of `tensor` in a buffer. `rule`: how the buffer type pads tensors."""
    return padded_bytes(tensor.type_name, tensor.shape, tensor.size_bytes, rule)


def row_padding_bytes(type_name: str, n_elements: int) -> int:
    """Return the bytes that row padding adds to a tensor of this type with rows of `n_elements`.

    Only the last row is padded, against reads out of bounds (`MATRIX_ROW_PADDING` in ggml-cuda/common.cuh).
    """
    _, block_elements, block_bytes = TYPES_BY_NAME[type_name]
    rest = n_elements % ROW_PADDING
    return (ROW_PADDING - rest) // block_elements * block_bytes if rest and block_elements > 1 else 0


def padded_bytes(type_name: str, shape: tuple[int, ...], size_bytes: int, rule: SizeRule) -> int:
    """Return the bytes of a tensor, or of a slice of one, in a buffer.

    `size_bytes`: bytes without padding. `rule`: how the buffer type pads tensors.
    """
    if rule.pads_rows and shape:
        # Also for a slice without rows: get_alloc_size looks at ne[0] alone.
        size_bytes += row_padding_bytes(type_name, shape[0])
    return pad(size_bytes, rule.alignment_bytes)


def row_slices(tensor: TensorInfo, shares: Sequence[float]) -> tuple[int, ...]:
    """Return the bytes of a weight on each device of split mode row.

    Mirrors `ggml_backend_sycl_split_buffer_type_get_alloc_size`.
    """
    _, block_elements, block_bytes = TYPES_BY_NAME[tensor.type_name]
    columns = tensor.shape[0]
    row_bytes = columns // block_elements * block_bytes
    rest = columns % ROW_PADDING
    # Unlike CUDA's padding also for types without blocks, and once on each member.
    padding_bytes = (ROW_PADDING - rest) // block_elements * block_bytes if rest else 0
    return tuple(rows * row_bytes + padding_bytes if rows else 0 for rows in rows_of_members(tensor, shares))


def is_repacked(tensor: TensorInfo) -> bool:
    """Return whether ggml's CPU backend has a repacked format for this tensor, which it uses if repacking is on."""
    # The repacked formats interleave 8 rows.
    if tensor.type_name not in REPACKED_TYPES or len(tensor.shape) < 2 or tensor.shape[1] % 8:
        return False
    # Matrices and stacks of experts are repacked; other stacks, as of MLA (`attn_k_b`, `attn_v_b`), are not.
    depth = 1
    for extent in tensor.shape[2:]:
        depth *= extent
    return depth == 1 or (len(tensor.shape) == 3 and _EXPERTS in tensor.name)


def file_spans(tensors: Iterable[TensorInfo], n_files: int) -> list[tuple[int, int]]:
    """Return (offset of the first byte, end of the last byte) of these tensors in each file."""
    spans = [_NO_SPAN] * n_files
    for tensor in tensors:
        if tensor.file_index < n_files:
            start, end = spans[tensor.file_index]
            spans[tensor.file_index] = (min(start, tensor.offset), max(end, tensor.offset + tensor.size_bytes))
    return spans


TOKEN_EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"

# Tensors outside of blocks: input tensors stay on the CPU, RoPE factor tensors are allocated once per buffer type that
# holds a layer which needs them, some go to the first layer, all else belongs to the output.
_INPUT = ("token_embd", "position_embd", "token_types", "per_layer_token_embd")
_ROPE = ("rope_freqs", "rope_factors_long", "rope_factors_short")
_FIRST_LAYER = ("token_embd_norm", "per_layer_model_proj", "per_layer_proj_norm", "hrm", "conv1d")
_NUMBERED = re.compile(r"(?:(?:enc|dec)\.blk|convnext|posnet)\.(\d{1,3})\.")
"""Names of tensors in layers of encoders, decoders and audio models.

llama.cpp places them like the block with the same number.
"""
_UNUSED = re.compile(r"masked_embd_|dec\.blk\.\d+\.cross_attn_rel_b")
"""Names of tensors that llama.cpp does not load."""

_LAZY = "per_layer_token_embd.weight"
_LAZY_BYTES = 1 << 32
"""Bytes above which per-layer embeddings stay in the file (`lazy_read::add`)."""


class TensorClasses(Struct, frozen=True):
    """Tensors of a model by the rule that determines their device.

    `blocks`: tensors of each layer.
    `inputs`: input tensors, which stay on the CPU.
    `ropes`: RoPE factors; each buffer type with a layer that needs them gets a copy.
    `outputs`: tensors of the output layer.
    `lazy`: input tensor that llama.cpp leaves in the file; None if there is none.
    """

    blocks: list[tuple[TensorInfo, ...]]
    inputs: list[TensorInfo]
    ropes: list[TensorInfo]
    outputs: list[TensorInfo]
    lazy: TensorInfo | None


def classify(model: ModelFile, architecture: Architecture | None) -> TensorClasses:
    """Return the tensors of `model`, grouped by the rule that chooses their device.

    Tensors that llama.cpp does not load are left out.
    """
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


def layers_with_rope_factors(model: ModelFile, architecture: Architecture | None) -> tuple[bool, ...]:
    """Return whether each layer needs RoPE factors; in some architectures layers with a sliding window do not."""
    sliding = model.hyper_parameter("attention.sliding_window_pattern")
    if architecture is None or not architecture.rope_factors_full_only or not isinstance(sliding, tuple):
        return (True,) * model.n_layers
    return tuple(index >= len(sliding) or not sliding[index] for index in range(model.n_layers))


_MOST_PATTERNS = 4096
"""Number of override patterns whose matches are cached."""


class OverrideMatches:
    """Finds the tensors of one model that overrides match.

    Matches are cached by pattern, since layouts share most patterns.
    """

    def __init__(self, model: ModelFile) -> None:
        self._names = tuple(tensor.name for tensor in model.tensors)
        self._found: dict[str, tuple[str, ...]] = {}

    def devices(self, overrides: tuple[TensorOverride, ...]) -> dict[str, str]:
        """Return the device id of each tensor that overrides move, by tensor name.

        The first override that matches decides.
        """
        homes: dict[str, str] = {}
        # Backwards, so that an earlier rule replaces what a later one has set.
        for override in reversed(overrides):
            names = self._found.get(override.pattern)
            if names is None:
                if len(self._found) >= _MOST_PATTERNS:
                    self._found.clear()
                finds = pattern_finder(override.pattern)
                names = self._found[override.pattern] = tuple(name for name in self._names if finds(name))
            homes.update(dict.fromkeys(names, override.device))
        return homes


def usable_rules(overrides: tuple[TensorOverride, ...]) -> list[tuple[Callable[[str], bool], str]]:
    """Return (function, device id) for each override; the function returns whether a tensor name matches its pattern.

    An invalid pattern matches nothing.
    """
    return [(pattern_finder(override.pattern), override.device) for override in overrides]
