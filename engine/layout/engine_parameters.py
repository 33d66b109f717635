"""What llama.cpp is told about a layout. Values here; the translation is `engine_parameters()`."""

from __future__ import annotations

import msgspec

MAX_DEVICES = 16
"""Length of the `tensor_split` array that llama.cpp copies (`llama_max_devices`)."""
MAX_ENTRIES = 15
"""Most entries of a device list: GGML_SCHED_MAX_BACKENDS less the final CPU backend."""


class TensorOverride(msgspec.Struct, frozen=True):
    """Weights whose name the ECMAScript regex `pattern` finds go to `device`."""

    pattern: str
    device: str


class EngineParameters(msgspec.Struct, frozen=True, kw_only=True):
    """`devices` are our ids in the order of the entries; `tensor_split` always has `MAX_DEVICES` entries, layer counts in mode layer."""

    n_gpu_layers: int
    devices: tuple[str, ...]
    tensor_split: tuple[float, ...]
    split_mode: str
    main_gpu: int = 0
    overrides: tuple[TensorOverride, ...] = ()
