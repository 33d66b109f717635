"""Operations of recurrent layers that make the RPC worker of a lent device abort: its backend has no kernel for them.

A lent device is a device of another computer, used over RPC.

On a local card, the scheduler assigns such an operation to the CPU. ggml's RPC client does not ask the worker whether
it has a kernel (`ggml_backend_rpc_device_supports_op`). Paired machines report their backend (`RemoteFacts.backend`).

The supported sizes in this module follow `ggml_backend_cuda_device_supports_op` and
`ggml_backend_vk_device_supports_op`. They follow the kernels themselves if these functions return true for all sizes
(wkv.cu, gla.cu, gated_delta_net.cu).
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.base.language import tr
from engine.model.architectures.registry import architecture_rules
from engine.model.gguf.model_file import ModelFile, TensorInfo
from engine.planning.layout.cache_rules import REMOTE_CUDA

_CUDA_THREADS = 128
"""Block size of CUDA's convolutions and Mamba 1 scans; the number of channels must be a multiple of it."""
_CUDA_MAMBA1_STATES = 16
_MAMBA2_STATES = {"CUDA": (96, 128, 256), "Vulkan": (128, 256)}
"""State sizes of Mamba 2 for which each backend has a kernel."""
_MAMBA2_HEAD = 16
"""The head size of Mamba 2 must be a multiple of this."""
_DELTA_HEADS = (16, 32, 64, 128)
_CUDA_WKV_HEADS = (64, 128)
_VULKAN_GATED_HEAD = 64
"""Head size of the Vulkan shader for gated linear attention (RWKV 6 with Qwen 2's layers)."""


def recurrent_gap(model: ModelFile, backend: str, layers: Iterable[int]) -> str | None:
    """Return an operation of these layers that a worker's backend cannot compute; None if none is known.

    It is a phrase for users, such as "scan with a state size of 64 in recurrent layers".

    `backend`: name of the backend in ggml, such as "CUDA".
    `layers`: indices of the layers.
    """
    family = "CUDA" if backend in REMOTE_CUDA else backend
    if family not in _MAMBA2_STATES or architecture_rules(model.architecture).recurrence is None:
        return None
    seen = set[frozenset[tuple[str, tuple[int, ...]]]]()
    for index in layers:
        tensors = {each.name.split(".", 2)[-1].removesuffix(".weight"): each for each in model.blocks[index].tensors}
        shapes = frozenset((name, tensor.shape) for name, tensor in tensors.items())
        # Most layers of a model are alike.
        if shapes not in seen:
            seen.add(shapes)
            if (gap := _layer_gap(model, family, tensors)) is not None:
                return gap
    return None


def _layer_gap(model: ModelFile, family: str, tensors: dict[str, TensorInfo]) -> str | None:
    if "time_mix_key" in tensors:
        return _wkv_gap(model, family, tensors)
    convolutions = [each for name, each in tensors.items() if name.startswith(("ssm_conv1d", "shortconv.conv"))]
    # The width of the window comes first; some files have dimensions of 1 besides (Kimi Linear). Biases have one.
    channels = [each.n_elements // each.shape[0] for each in convolutions if len(each.shape) > 1]
    odd = next((each for each in channels if each % _CUDA_THREADS), None)
    if family == "CUDA" and odd is not None:
        return tr("convolution over {count} channels in recurrent layers", count=odd)
    if "ssm_d" in tensors:
        return _scan_gap(model, family, tensors)
    return _delta_gap(model) if any(name.startswith("ssm_conv1d") for name in tensors) else None


def _wkv_gap(model: ModelFile, family: str, tensors: dict[str, TensorInfo]) -> str | None:
    head = _number(model, "wkv.head_size")
    is_gated = "time_mix_first" not in tensors and "time_mix_w0" not in tensors
    heads = _CUDA_WKV_HEADS if family == "CUDA" else (_VULKAN_GATED_HEAD,) if is_gated else ()
    if head is None or not heads or head in heads:
        return None
    return tr("time mixing with heads of width {width} in recurrent layers", width=head)


def _scan_gap(model: ModelFile, family: str, tensors: dict[str, TensorInfo]) -> str | None:
    inner, states, heads = (_number(model, f"ssm.{key}") for key in ("inner_size", "state_size", "time_step_rank"))
    if inner is None or states is None:
        return None
    decay = tensors["ssm_a"].shape if "ssm_a" in tensors else ()
    # Mamba 1 has a decay for each element of the state, Mamba 2 one for each head.
    if len(decay) > 1 and decay[0] > 1:
        is_known = family == "CUDA" and states == _CUDA_MAMBA1_STATES and inner % _CUDA_THREADS == 0
        return (
            None if is_known else tr("SSM scan of Mamba 1 with a state size of {size} in recurrent layers", size=states)
        )
    if states not in _MAMBA2_STATES[family]:
        return tr("SSM scan with a state size of {size} in recurrent layers", size=states)
    head = inner // heads if heads else None
    return (
        tr("SSM scan with heads of width {width} in recurrent layers", width=head)
        if head is not None and head % _MAMBA2_HEAD
        else None
    )


def _delta_gap(model: ModelFile) -> str | None:
    inner, heads = _number(model, "ssm.inner_size"), _number(model, "ssm.time_step_rank")
    head = _number(model, "kda.head_dim") or (inner // heads if inner and heads else None)
    return (
        None
        if head is None or head in _DELTA_HEADS
        else tr("delta net with heads of width {width} in recurrent layers", width=head)
    )


def _number(model: ModelFile, key: str) -> int | None:
    value = model.hyper_parameter(key)
    return value if isinstance(value, int) and value > 0 else None
