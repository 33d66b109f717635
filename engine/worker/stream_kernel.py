"""Whether a device mixes the residual streams of a layer with each other: it is asked about that operation."""

from __future__ import annotations

import ctypes

from engine.worker.bindings import Bindings, InitParams

_F32 = 0
"""`GGML_TYPE_F32`."""
_MIXES = 24
"""Numbers for a token with four streams: what each gives and takes, and what goes from each to each."""
_SCALES = 3
_LEAST = 1e-6
_STEPS = 1
_ROOM_BYTES = 1 << 16


def mixes_streams(engine: Bindings, device: int) -> bool:
    """Return whether a device has a kernel for `ggml_dsv4_hc_comb`."""
    pointer = ctypes.c_void_p
    new_tensor = engine.bind("ggml_new_tensor_1d", pointer, pointer, ctypes.c_int, ctypes.c_int64)
    supports = engine.bind("ggml_backend_dev_supports_op", ctypes.c_bool, pointer, pointer)
    mix = engine.bind("ggml_dsv4_hc_comb", pointer, pointer, pointer, pointer, pointer, ctypes.c_float, ctypes.c_int32)
    tensors = engine.bind("ggml_init", pointer, InitParams)(InitParams(_ROOM_BYTES, None, True))
    try:
        mixes, scale, base = (new_tensor(tensors, _F32, size) for size in (_MIXES, _SCALES, _MIXES))
        return bool(supports(device, mix(tensors, mixes, scale, base, _LEAST, _STEPS)))
    finally:
        engine.bind("ggml_free", None, pointer)(tensors)
