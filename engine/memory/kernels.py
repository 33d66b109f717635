"""Weights that a backend has no kernel for: the engine keeps those on the host, whatever device their layer is on.

It asks the device about the one operation that each tensor is for (`weight_buft_supported` in llama-model-loader.cpp).
These are the answers of the backends, as far as known models meet them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from engine.architectures.record import Architecture
from engine.gguf.model_file import ModelFile, TensorInfo
from engine.memory.hyper_parameters import MissingNumberError, number

Backend = Literal["all", "cuda", "vulkan"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Whose kernels a device has (RPC says yes to everything), and the largest tensor that they take, None: any.

    `mixes_streams`: see `Device`.
    """

    backend: Backend = "all"
    largest_bytes: int | None = None
    mixes_streams: bool = True


ALL_KERNELS = Kernels()

_CONVOLUTIONS = ("ssm_conv1d.weight", "shortconv.conv.weight")
_SCAN = "ssm_a"
_RWKV6_STEP = "time_mix_first.weight"
_RWKV6_BYTES = 4 * (123 * 123) * (123 + 123 * 123)
"""The engine asks for RWKV 6's step with 123 heads of 123, as many tokens and sequences: this is what it would make."""
_NOT_MULTIPLIED: dict[Backend, frozenset[str]] = {
    "all": frozenset(),
    "cuda": frozenset({"TQ1_0", "TQ2_0", "F64", "I8", "I16", "I64"}),
    "vulkan": frozenset({"F64", "I8", "I16", "I64"}),
}
_CUDA_THREADS = 128
_ASKED_TOKENS = 512
"""Tokens that a matrix is asked about with."""
_EXPERTS = "exps"


def find_unsupported(model: ModelFile, architecture: Architecture | None, kernels: Kernels) -> frozenset[str]:
    """Return the names of the tensors that such a device leaves to the host, in layers or behind them: a tied embedding
    is among them where its device does not multiply with it."""
    if kernels == ALL_KERNELS:
        return frozenset()
    scans = architecture is not None and _scans(architecture)
    tensors = chain(model.global_tensors, *(block.tensors for block in model.blocks))
    return frozenset(tensor.name for tensor in tensors if _is_unsupported(model, tensor, kernels, scans=scans))


def is_too_large(tensor: TensorInfo, kernels: Kernels) -> bool:
    """Return whether a device with these kernels cannot even look up rows of a tensor."""
    return kernels.largest_bytes is not None and tensor.size_bytes > kernels.largest_bytes


def _scans(architecture: Architecture) -> bool:
    """Return whether `ssm_a` is for the scan of Mamba; delta nets only multiply by it."""
    rule = architecture.recurrence
    return rule is not None and rule.layers != "interval" and rule.state in ("scan", "grouped_scan")


def _is_unsupported(model: ModelFile, tensor: TensorInfo, kernels: Kernels, *, scans: bool) -> bool:
    if tensor.type_name in _NOT_MULTIPLIED[kernels.backend] and len(tensor.shape) > 1:
        return True
    if kernels.largest_bytes is not None and _asked_bytes(model, tensor) > kernels.largest_bytes:
        return True
    stem = tensor.name.split(".", 2)[-1]
    if stem == _RWKV6_STEP:
        return kernels.largest_bytes is not None and kernels.largest_bytes < _RWKV6_BYTES
    if stem in _CONVOLUTIONS:
        rows = tensor.shape[1] if len(tensor.shape) > 1 else 1
        return kernels.backend == "cuda" and rows % _CUDA_THREADS != 0
    return kernels.backend != "all" and stem == _SCAN and scans and not _has_scan(model, tensor, kernels)


def _asked_bytes(model: ModelFile, tensor: TensorInfo) -> int:
    """Return the bytes of the largest tensor of the product that is asked about: the matrix, what it is multiplied
    with or what comes out, for each of the experts that a token gets."""
    if len(tensor.shape) < 2:
        return tensor.size_bytes
    counts = _experts_used(model) if _EXPERTS in tensor.name else math.prod(tensor.shape[2:])
    return max(tensor.size_bytes, 4 * _ASKED_TOKENS * counts * max(tensor.shape[:2]))


def _experts_used(model: ModelFile) -> int:
    value = model.hyper_parameter("expert_used_count")
    counts = value if isinstance(value, tuple) else (value,)
    return max((count for count in counts if isinstance(count, int)), default=1)


def _has_scan(model: ModelFile, tensor: TensorInfo, kernels: Kernels) -> bool:
    try:
        inner, state = number(model, "ssm.inner_size"), number(model, "ssm.state_size")
        n_groups = number(model, "ssm.group_count", 1, least=0) or 1
    except MissingNumberError:
        return True
    n_heads = tensor.shape[1] if len(tensor.shape) > 1 else 1
    head = inner // n_heads
    if tensor.shape[0] == 1:
        sizes = (96, 128, 256) if kernels.backend == "cuda" else (128, 256)
        return state in sizes and head % 16 == 0
    return (
        kernels.backend == "cuda" and (tensor.shape[0], head, n_groups) == (16, 1, 1) and n_heads % _CUDA_THREADS == 0
    )
