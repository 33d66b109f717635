"""The largest tensor that a device computes with. None tells it, but each can be asked about an operation."""

from __future__ import annotations

import ctypes

from engine.worker.bindings import Bindings, InitParams

_I8 = 24
"""`GGML_TYPE_I8`: a byte for each element."""
_MOST_BYTES = 1 << 46
_LEAST_BYTES = 1 << 20
_ROOM_BYTES = 1 << 16


def largest_tensor_bytes(engine: Bindings, device: int) -> int:
    """Return the size in bytes beyond which tensors are left to other devices; 0 if there is none.

    A tensor without data and without an operation asks for nothing but room, so that halving finds the size.
    """
    pointer = ctypes.c_void_p
    new_tensor = engine.bind("ggml_new_tensor_1d", pointer, pointer, ctypes.c_int, ctypes.c_int64)
    supports = engine.bind("ggml_backend_dev_supports_op", ctypes.c_bool, pointer, pointer)
    tensors = engine.bind("ggml_init", pointer, InitParams)(InitParams(_ROOM_BYTES, None, True))
    try:
        taken, refused = _LEAST_BYTES, _MOST_BYTES
        if supports(device, new_tensor(tensors, _I8, refused)) or not supports(device, new_tensor(tensors, _I8, taken)):
            return 0
        while refused - taken > 1:
            middle = (taken + refused) // 2
            if supports(device, new_tensor(tensors, _I8, middle)):
                taken = middle
            else:
                refused = middle
        return taken
    finally:
        engine.bind("ggml_free", None, pointer)(tensors)
