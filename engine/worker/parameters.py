"""Our settings as llama.cpp's structs, every field written: the engine's and the binding's defaults are not ours."""

from __future__ import annotations

import ctypes
from typing import Any

from engine.layout.engine_parameters import MATCHES_NO_TENSOR, EngineParameters, TensorOverride
from engine.processor import default_threads
from engine.settings.context_settings import ContextSettings
from engine.worker.bindings import Bindings, TensorOverrideEntry
from engine.worker.devices import CPU_ID, ResolvedDevices
from engine.worker.outcome import failure
from engine.worker.stop import StopRequest

GGML_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
LOAD_MODES = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap_mlock": 3, "direct_io": 4}
LAZY_AUTO = 1
UNSPECIFIED = -1


class ModelParameters:
    """`llama_model_params` with the arrays that it points to, which live as long as this object."""

    def __init__(
        self,
        engine: Bindings,
        parameters: EngineParameters,
        devices: ResolvedDevices,
        context: ContextSettings,
        *,
        dry: bool,
    ) -> None:
        entries = [devices.by_id[device_id] for device_id in parameters.devices]
        self._devices = (ctypes.c_void_p * (len(entries) + 1))(*entries, None)
        split_length = engine.low.llama_max_devices()
        self._split = (ctypes.c_float * split_length)(*parameters.tensor_split[:split_length])
        overrides = parameters.overrides or _stop_of_pipeline(parameters, context)
        self._overrides = _override_table(engine, overrides, devices)
        self._callback = engine.low.llama_progress_callback()
        struct = engine.low.llama_model_default_params()
        struct.devices = ctypes.addressof(self._devices)
        struct.tensor_buft_overrides = ctypes.addressof(self._overrides) if overrides else None
        struct.n_gpu_layers = parameters.n_gpu_layers
        struct.split_mode = _choice(SPLIT_MODES, parameters.split_mode, "split mode")
        # a dry run with a mapped file is an assertion in llama.cpp
        struct.load_mode = LOAD_MODES["none"] if dry else _choice(LOAD_MODES, context.load_mode, "load mode")
        struct.lazy_mode = LAZY_AUTO
        # an index into an empty list is refused; -1 stands for "no device"
        struct.main_gpu = parameters.main_gpu if entries else -1
        struct.tensor_split = self._split
        struct.progress_callback = self._callback
        struct.progress_callback_user_data = None
        struct.kv_overrides = None
        struct.vocab_only = False
        struct.check_tensors = False
        struct.use_extra_bufts = parameters.extra_buffers
        struct.no_host = False
        struct.no_alloc = dry
        struct.load_mtp = False
        self.struct: Any = struct

    def report_progress_to(self, callback: Any) -> None:
        """Have the C callback `callback(fraction, data) -> bool` told what was read; False ends the load."""
        self._callback = callback
        self.struct.progress_callback = callback


def context_struct(engine: Bindings, context: ContextSettings, stop: StopRequest | None) -> Any:
    """Return `llama_context_params` for these settings; `stop` ends a computation on the CPU between graph nodes."""
    low = engine.low
    struct = low.llama_context_default_params()
    struct.n_ctx = context.n_ctx
    struct.n_batch = context.n_batch
    struct.n_ubatch = context.n_ubatch
    struct.n_seq_max = context.n_seq_max
    struct.n_rs_seq = 0
    struct.n_outputs_max = 0
    struct.n_outputs_max_per_seq = 1
    struct.n_threads = context.threads or default_threads()
    struct.n_threads_batch = context.threads_batch or context.threads or default_threads()
    struct.ctx_type = 0
    struct.rope_scaling_type = UNSPECIFIED
    struct.pooling_type = UNSPECIFIED
    struct.attention_type = UNSPECIFIED
    struct.flash_attn_type = _choice(FLASH_ATTENTION, context.flash_attn, "flash attention")
    struct.rope_freq_base = struct.rope_freq_scale = 0.0
    struct.yarn_ext_factor = struct.yarn_attn_factor = -1.0
    struct.yarn_beta_fast = struct.yarn_beta_slow = -1.0
    struct.yarn_orig_ctx = 0
    struct.defrag_thold = -1.0
    struct.cb_eval = low.ggml_backend_sched_eval_callback()
    struct.cb_eval_user_data = None
    struct.type_k = _choice(GGML_TYPES, context.type_k, "KV type")
    struct.type_v = _choice(GGML_TYPES, context.type_v, "KV type")
    struct.abort_callback = low.ggml_abort_callback() if stop is None else stop.native_callback(low.ggml_abort_callback)
    struct.abort_callback_data = None if stop is None else stop.address
    struct.embeddings = False
    struct.offload_kqv = context.offload_kqv
    struct.no_perf = True
    struct.op_offload = bool(context.op_offload)
    struct.swa_full = context.swa_full
    struct.kv_unified = context.kv_unified
    struct.samplers = None
    struct.n_samplers = 0
    struct.ctx_other = None
    return struct


def _stop_of_pipeline(parameters: EngineParameters, context: ContextSettings) -> tuple[TensorOverride, ...]:
    """Return what keeps several devices from running as a pipeline: the engine has no switch for it, but does not
    begin one where there is any override, if of no tensor."""
    several = parameters.split_mode == "layer" and len(parameters.devices) > 1
    return (TensorOverride(MATCHES_NO_TENSOR, CPU_ID),) if several and context.pipeline != "on" else ()


def _override_table(engine: Bindings, overrides: tuple[TensorOverride, ...], devices: ResolvedDevices) -> Any:
    table = (TensorOverrideEntry * (len(overrides) + 1))()
    for entry, override in zip(table, overrides, strict=False):
        entry.pattern = override.pattern.encode()
        if override.device == CPU_ID:
            entry.buffer_type = engine.cpu_buffer_type()
        else:
            entry.buffer_type = engine.device_buffer_type(devices.by_id[override.device])
    return table


def _choice(choices: dict[str, int], name: str, what: str) -> int:
    if name not in choices:
        raise failure("layout", f'"{name}" is not a {what}; use {", ".join(choices)}.')
    return choices[name]
