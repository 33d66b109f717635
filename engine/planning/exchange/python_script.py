"""Export of a plan as a Python script for llama-cpp-python.

The binding's class `Llama` has no argument for a device list, and sets some fields itself. So the script sets the
plan's values in `llama_model_params` and `llama_context_params` at the moment when `Llama` passes them to llama.cpp.
In this way every layout is possible, even with the CPU between devices or with a device used twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pprint import pformat

from engine.base.language import tr
from engine.devices.device import CPU_ID
from engine.planning.exchange.exported import Exported
from engine.planning.exchange.server_command import MIN_BATCH_VARIABLE, device_notes
from engine.planning.layout.engine_parameters import ENGINE_SPLIT_MODES, MATCHES_NO_TENSOR, TensorOverride
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import OFFLOAD_MIN_BATCH
from engine.planning.settings.table import ENGINE_LOAD_MODES, engine_fields

ENGINE = "llama-cpp-python 0.3.36"

_SCRIPT = '''\
"""Loads {name} on the devices of a Layerdeck layout.

Needs {engine}, built for these devices (for RPC workers with -DGGML_RPC=ON).
"""

import ctypes
import os
import sys

{environment}import llama_cpp
from llama_cpp import llama_cpp as low

MODEL = {model}
# An RPC worker is (host:port, number of the device on it). Layers are in the order of this list.
DEVICES = {devices}
# Layers on each entry of DEVICES, or its share of every layer in split modes tensor and row.
SPLIT = {split}
# (pattern on tensor names, place): these weights are elsewhere than their layer. The first match wins.
OVERRIDES = {overrides}
MODEL_PARAMS = {model_params}
CONTEXT_PARAMS = {context_params}
ADAPTERS = {adapters}
PROJECTOR = {projector}
PROJECTOR_DEVICE = {projector_device}
# Fields of `mtmd_context_params`.
PROJECTOR_PARAMS = {projector_params}


def bind(name, result, *arguments):
    """Return a function of ggml from the binding's own library; a second copy would have other devices."""
    function = getattr(low._lib, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


POINTER, TEXT = ctypes.c_void_p, ctypes.c_char_p
low.llama_backend_init()
{numa}by_name = bind("ggml_backend_dev_by_name", POINTER, TEXT)
registry_device = bind("ggml_backend_reg_dev_get", POINTER, POINTER, ctypes.c_size_t)
buffer_type = bind("ggml_backend_dev_buffer_type", POINTER, POINTER)
cpu_buffer_type = bind("ggml_backend_cpu_buffer_type", POINTER)


def rpc_server(endpoint):
    """Connect to an RPC worker, and return its registry."""
    registry = bind("ggml_backend_reg_by_name", POINTER, TEXT)(b"RPC")
    address = bind("ggml_backend_reg_get_proc_address", POINTER, POINTER, TEXT)
    add = address(registry, b"ggml_backend_rpc_add_server") if registry else None
    if not add:
        sys.exit("This llama-cpp-python has no RPC; build it with -DGGML_RPC=ON.")
    found = ctypes.CFUNCTYPE(POINTER, TEXT)(add)(endpoint.encode())
    return found or sys.exit(f"No RPC worker answers at {{endpoint}}.")


def device(place):
    """Return the ggml device of an entry of DEVICES."""
    if isinstance(place, tuple):
        endpoint, number = place
        found = registry_device(servers[endpoint], number)
    else:
        found = by_name(place.encode())
    return found or sys.exit(f"There is no device {{place}} here.")


PLACES = [*DEVICES, *(place for _, place in OVERRIDES), PROJECTOR_DEVICE]
servers = {{place[0]: rpc_server(place[0]) for place in PLACES if isinstance(place, tuple)}}


class Override(ctypes.Structure):
    """llama_model_tensor_buft_override"""

    _fields_ = [("pattern", TEXT), ("buffer_type", POINTER)]


# These arrays have to live until the model is loaded.
device_list = (POINTER * (len(DEVICES) + 1))(*map(device, DEVICES), None)
split = (ctypes.c_float * low.llama_max_devices())(*SPLIT)
overrides = (Override * (len(OVERRIDES) + 1))()
for entry, (pattern, place) in zip(overrides, OVERRIDES):
    entry.pattern = pattern.encode()
    entry.buffer_type = cpu_buffer_type() if place == "CPU" else buffer_type(device(place))

load_model, make_context = low.llama_model_load_from_file, low.llama_init_from_model


def load_as_laid_out(path, params):
    for key, value in MODEL_PARAMS.items():
        setattr(params, key, value)
    params.devices = ctypes.addressof(device_list)
    params.tensor_split = split
    params.tensor_buft_overrides = ctypes.addressof(overrides) if OVERRIDES else None
    return load_model(path, params)


def make_context_as_laid_out(model, params):
    for key, value in CONTEXT_PARAMS.items():
        setattr(params, key, value)
    return make_context(model, params)


def load(**options):
    """Return the model as `llama_cpp.Llama`; `options` are further arguments for it."""
    low.llama_model_load_from_file, low.llama_init_from_model = load_as_laid_out, make_context_as_laid_out
    try:
        # `Llama` keeps these four for itself.
        numbers = {{key: CONTEXT_PARAMS[key] for key in ("n_ctx", "n_batch", "n_ubatch", "n_threads")}}
        llama = llama_cpp.Llama(MODEL, chat_handler=chat_handler(), **numbers, **options)
    finally:
        low.llama_model_load_from_file, low.llama_init_from_model = load_model, make_context
    apply_adapters(llama)
    return llama


def chat_handler():
    """Return the handler for images and sound; None without a projector."""
    if PROJECTOR is None:
        return None
    from llama_cpp import mtmd_cpp
    from llama_cpp.llama_chat_format import MTMDChatHandler

    default = mtmd_cpp.mtmd_context_params_default

    def on_device():
        params = default()
        for key, value in PROJECTOR_PARAMS.items():
            setattr(params, key, value)
        if PROJECTOR_DEVICE is not None:
            params.device = device(PROJECTOR_DEVICE)
        return params

    mtmd_cpp.mtmd_context_params_default = on_device
    return MTMDChatHandler(clip_model_path=PROJECTOR, use_gpu=PROJECTOR_DEVICE is not None)


def apply_adapters(llama):
    """Load the LoRA adapters, and apply them with their scales."""
    if not ADAPTERS:
        return
    handles = [low.llama_adapter_lora_init(llama.model, path.encode()) for path, _ in ADAPTERS]
    if not all(handles):
        sys.exit("A LoRA adapter could not be loaded.")
    count = len(handles)
    scales = (ctypes.c_float * count)(*(scale for _, scale in ADAPTERS))
    low.llama_set_adapters_lora(llama.ctx, (low.llama_adapter_lora_p_ctypes * count)(*handles), count, scales)


if __name__ == "__main__":
    question = " ".join(sys.argv[1:]) or "Hello!"
    answer = load().create_chat_completion(messages=[{{"role": "user", "content": question}}], max_tokens=256)
    print(answer["choices"][0]["message"]["content"])
'''


def export_python(plan: Plan) -> Exported:
    """Return the plan as a Python script for llama-cpp-python.

    Raises:
        RuleViolationError: the plan breaks a rule of llama.cpp.
        LayoutError: the layout cannot be translated.
    """
    used, parameters, files = plan.settings, plan.parameters, plan.edit.side_files
    overrides = parameters.overrides
    several = parameters.split_mode == "layer" and len(parameters.devices) > 1
    if not overrides and several and used.pipeline != "on":
        # llama.cpp has no parameter for it, but computes no pipeline with an override.
        overrides = (TensorOverride(MATCHES_NO_TENSOR, CPU_ID),)
    projector = plan.resolved.projector_device if files.projector is not None else CPU_ID
    batch = used.offload_batch
    text = _SCRIPT.format(
        # A quotation mark or backslash of a name must not end the docstring.
        name=plan.model.paths[0].name.replace("\\", "/").replace('"', "'").replace("\n", " "),
        engine=ENGINE,
        environment=""
        if batch == OFFLOAD_MIN_BATCH
        else f'# Before the engine is loaded.\nos.environ["{MIN_BATCH_VARIABLE}"] = "{batch}"\n',
        numa="" if used.numa == "off" else f"low.llama_numa_init(low.GGML_NUMA_STRATEGY_{used.numa.upper()})\n",
        model=_literal(str(plan.model.paths[0].absolute())),
        devices=_literal([_place(plan, each) for each in parameters.devices]),
        split=_literal(list(parameters.tensor_split[: len(parameters.devices)])),
        overrides=_literal([(each.pattern, _place(plan, each.device)) for each in overrides]),
        model_params=_literal(_model_params(plan)),
        context_params=_literal(_context_params(plan)),
        adapters=_literal([(str(each.path.absolute()), each.scale) for each in files.adapters]),
        projector=_literal(None if files.projector is None else str(files.projector.path.absolute())),
        projector_device=_literal(None if projector == CPU_ID else _place(plan, projector)),
        projector_params=_literal(_projector_params(plan)),
    )
    if batch == OFFLOAD_MIN_BATCH:
        text = text.replace("import os\n", "", 1)
    ids = tuple(dict.fromkeys((*parameters.devices, *(each.device for each in overrides), projector)))
    return Exported(text, (*device_notes(plan, ids), *_notes(plan)), "load_model.py")


def _notes(plan: Plan) -> Iterator[str]:
    if plan.edit.side_files.draft is not None:
        yield tr("The draft model was not exported: the script loads only the model itself.")
    if plan.settings.n_seq_max > 1:
        yield tr(
            "llama-cpp-python answers one request at a time, but reserves the memory for {count} requests.",
            count=plan.settings.n_seq_max,
        )


def _place(plan: Plan, device_id: str) -> str | tuple[str, int]:
    device = plan.rig.device(device_id)
    if device is None or device.endpoint is None:
        return device_id
    return device.endpoint, device.endpoint_device


def _model_params(plan: Plan) -> dict[str, object]:
    parameters = plan.parameters
    return {
        "n_gpu_layers": parameters.n_gpu_layers,
        "split_mode": ENGINE_SPLIT_MODES[parameters.split_mode],
        "main_gpu": parameters.main_gpu if parameters.devices else -1,
        "load_mode": ENGINE_LOAD_MODES[plan.settings.load_mode],
        "use_extra_bufts": parameters.extra_buffers,
    }


def _context_params(plan: Plan) -> dict[str, object]:
    used = plan.settings
    return {
        **engine_fields(used),
        "n_threads": used.threads,
        "n_threads_batch": used.threads_batch or used.threads,
    }


def _projector_params(plan: Plan) -> dict[str, int]:
    limits = {
        "image_min_tokens": plan.settings.image_min_tokens,
        "image_max_tokens": plan.settings.image_max_tokens,
    }
    # The other limits are the projector's own.
    return {key: limit for key, limit in limits.items() if limit is not None}


def _literal(value: object) -> str:
    return pformat(value, width=110, sort_dicts=False)
