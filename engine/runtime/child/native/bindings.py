"""C functions of llama.cpp and ggml, all from the library handle that `llama_cpp` has opened.

The wheel ships copies of the libraries instead of links. So opening `libggml-base` by its path would load it a second
time, with a device registry of its own. Addresses of native objects are plain ints here.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module, util
from pathlib import Path
from typing import Any

_POINTER = ctypes.c_void_p
_TEXT = ctypes.c_char_p

ABORT_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)

DEVICE_KINDS = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}
"""Names of the values of ggml_backend_dev_type. META is missing, because only llama.cpp itself creates such devices."""
CPU_TYPE = 0
_DEBUG = 1
ACCELERATOR_TYPE = 3

# Mangled names of C++ functions, which are exported although they are not part of llama.h.
_BREAKDOWN = "_Z26llama_get_memory_breakdownPK13llama_context"
_MODEL_BREAKDOWN = "_ZNK11llama_model16memory_breakdownEv"
# Functions of llama-ext.h, with their names by the C++ ABIs of Linux and macOS, and of Windows.
_SET_NEXTN = (
    "_Z26llama_set_embeddings_nextnP13llama_contextbb",
    "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
)
_NEXTN = ("_Z26llama_get_embeddings_nextnP13llama_context", "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z")
_NEXTN_ROW = (
    "_Z30llama_get_embeddings_nextn_ithP13llama_contexti",
    "?llama_get_embeddings_nextn_ith@@YAPEAMPEAUllama_context@@H@Z",
)


class DeviceProps(ctypes.Structure):
    """ctypes structure of `ggml_backend_dev_props`."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("caps", ctypes.c_bool * 8),
    ]


class TensorOverrideEntry(ctypes.Structure):
    """ctypes structure of `llama_model_tensor_buft_override`."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


class InitParams(ctypes.Structure):
    """ctypes structure of `ggml_init_params`."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def prepare_environment() -> None:
    """Set environment variables that ggml reads at its start. It must be called before `Bindings()`."""
    # Without GGML_NO_BACKTRACE an abort starts gdb if there is one. CUDA's default order is fastest first.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


class Bindings:
    """The loaded libraries of llama.cpp and ggml.

    `low`: the module `llama_cpp.llama_cpp`. Most other attributes are C functions that `low` lacks.
    """

    def __init__(self) -> None:
        self.low: Any = _low_level()
        self.send_abort_text: Callable[[str], None] = lambda _text: None
        """Sends the reason why this process is about to end; set by `on_abort`."""
        self._libraries = _libraries(self.low)
        bind = self.bind
        self.device_count = bind("ggml_backend_dev_count", ctypes.c_size_t)
        self.device_get = bind("ggml_backend_dev_get", _POINTER, ctypes.c_size_t)
        self.device_by_type = bind("ggml_backend_dev_by_type", _POINTER, ctypes.c_int)
        self.device_by_name = bind("ggml_backend_dev_by_name", _POINTER, _TEXT)
        self._device_name = bind("ggml_backend_dev_name", _TEXT, _POINTER)
        self._device_description = bind("ggml_backend_dev_description", _TEXT, _POINTER)
        self.device_type = bind("ggml_backend_dev_type", ctypes.c_int, _POINTER)
        self._device_props = bind("ggml_backend_dev_get_props", None, _POINTER, ctypes.POINTER(DeviceProps))
        self._device_memory = bind(
            "ggml_backend_dev_memory", None, _POINTER, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
        )
        self.device_registry = bind("ggml_backend_dev_backend_reg", _POINTER, _POINTER)
        self.device_buffer_type = bind("ggml_backend_dev_buffer_type", _POINTER, _POINTER)
        self.device_host_buffer_type = bind("ggml_backend_dev_host_buffer_type", _POINTER, _POINTER)
        self._registry_name = bind("ggml_backend_reg_name", _TEXT, _POINTER)
        self.registry_device_count = bind("ggml_backend_reg_dev_count", ctypes.c_size_t, _POINTER)
        self.registry_device_get = bind("ggml_backend_reg_dev_get", _POINTER, _POINTER, ctypes.c_size_t)
        self.registry_function = bind("ggml_backend_reg_get_proc_address", _POINTER, _POINTER, _TEXT)
        self._buffer_type_name = bind("ggml_backend_buft_name", _TEXT, _POINTER)
        self.buffer_type_is_host = bind("ggml_backend_buft_is_host", ctypes.c_bool, _POINTER)
        self.buffer_type_max_size = bind("ggml_backend_buft_get_max_size", ctypes.c_size_t, _POINTER)
        self.buffer_type_alignment = bind("ggml_backend_buft_get_alignment", ctypes.c_size_t, _POINTER)
        self.buffer_type_device = bind("ggml_backend_buft_get_device", _POINTER, _POINTER)
        self.cpu_buffer_type = bind("ggml_backend_cpu_buffer_type", _POINTER)
        self._set_abort_callback = bind("ggml_set_abort_callback", _POINTER, ABORT_CALLBACK)
        self.load_backend = bind("ggml_backend_load", _POINTER, _TEXT)
        self.unload_backend = bind("ggml_backend_unload", None, _POINTER)
        self.load_backends_in = bind("ggml_backend_load_all_from_path", None, _TEXT)
        self._registry_by_name = bind("ggml_backend_reg_by_name", _POINTER, _TEXT)
        self.allocate_buffer = bind("ggml_backend_buft_alloc_buffer", _POINTER, _POINTER, ctypes.c_size_t)
        self.free_buffer = bind("ggml_backend_buffer_free", None, _POINTER)
        self.context_breakdown = self._bind_optional(_BREAKDOWN)
        self.model_breakdown = self._bind_optional(_MODEL_BREAKDOWN)
        # What drafts by MTP heads need; None if this version of llama.cpp does not export them.
        floats = ctypes.POINTER(ctypes.c_float)
        self.set_nextn = self._bind_first(_SET_NEXTN, None, _POINTER, ctypes.c_bool, ctypes.c_bool)
        self.nextn = self._bind_first(_NEXTN, floats, _POINTER)
        self.nextn_row = self._bind_first(_NEXTN_ROW, floats, _POINTER, ctypes.c_int32)
        # ctypes callbacks that native code holds: a callback that Python collects would be a dangling pointer.
        self._kept: list[Any] = []
        self.projector_log_callback: Any = None
        """Log callback for mtmd. It drops debug lines, which quote the text of conversations."""

    def on_abort(self, send_text: Callable[[str], None]) -> None:
        """Set the function that gets the text of a failed assertion. The process aborts when this function returns."""
        self.send_abort_text = send_text
        callback = ABORT_CALLBACK(lambda text: send_text((text or b"").decode("utf-8", "replace").strip()))
        self._kept.append(callback)
        # ggml calls it in the thread that aborts, and then abort(): Python code runs a last time.
        self._set_abort_callback(callback)

    def on_log(self, write: Callable[[int, str], None]) -> None:
        """Pass all log text of llama.cpp and ggml to `write(level, text)`, instead of the binding's own printing."""
        callback = self.low.llama_log_callback(lambda level, text, _data: write(level, text.decode("utf-8", "replace")))
        spared = self.low.llama_log_callback(
            lambda level, text, _data: write(level, text.decode("utf-8", "replace")) if level > _DEBUG else None
        )
        self._kept += [callback, spared]
        self.projector_log_callback = spared
        self.low.llama_log_set(callback, _POINTER(0))

    def devices(self) -> list[int]:
        """Return the addresses of the registered devices, in ggml's order."""
        return [self.device_get(index) for index in range(self.device_count())]

    def cpu_device(self) -> int:
        return int(self.device_by_type(CPU_TYPE))

    def device_name(self, device: int) -> str:
        return _decoded(self._device_name(device))

    def device_description(self, device: int) -> str:
        return _decoded(self._device_description(device))

    def device_props(self, device: int) -> DeviceProps:
        """Return the properties of a device. On CUDA this makes a context on the card."""
        props = DeviceProps()
        self._device_props(device, ctypes.byref(props))
        return props

    def device_memory(self, device: int) -> tuple[int, int]:
        """Return free and total bytes of a device, as it reports them now."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._device_memory(device, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    @property
    def folder(self) -> Path:
        """The folder of llama.cpp's libraries."""
        return Path(self.low._lib._name).absolute().parent

    @cached_property
    def rpc_add_server(self) -> Any:
        """The C function `ggml_backend_rpc_add_server`."""
        return ctypes.CFUNCTYPE(_POINTER, _TEXT)(self._rpc_function(b"ggml_backend_rpc_add_server"))

    @cached_property
    def rpc_start_server(self) -> Any:
        """The C function `ggml_backend_rpc_start_server`."""
        kind = ctypes.CFUNCTYPE(None, _TEXT, _TEXT, ctypes.c_size_t, ctypes.c_size_t, _POINTER)
        return kind(self._rpc_function(b"ggml_backend_rpc_start_server"))

    def _rpc_function(self, name: bytes) -> int:
        """Return the address of a function of the RPC backend, from the backend's registry.

        ggml may have loaded the backend as a library itself; then its symbols can be found only through the registry.
        """
        registry = self._registry_by_name(b"RPC")
        address = self.registry_function(registry, name) if registry else None
        if not address:
            raise ImportError("llama_cpp was built without RPC; build it with GGML_RPC=ON")
        return int(address)

    def registry_name(self, registry: int) -> str:
        return _decoded(self._registry_name(registry))

    def buffer_type_name(self, buffer_type: int) -> str:
        return _decoded(self._buffer_type_name(buffer_type))

    def bind(self, name: str, result: Any, *arguments: Any) -> Any:
        """Return a C function of llama.cpp or ggml, with its types set. `result`, `arguments`: ctypes types.

        Raises:
            ImportError: the libraries were built without this function.
        """
        for library in self._libraries:
            try:
                # Indexing makes a new function object each time. The one from attribute access is shared with the
                # binding, which sets other types on it.
                function = library[name]
            except AttributeError:
                continue
            function.restype, function.argtypes = result, list(arguments)
            return function
        raise ImportError(f"llama_cpp was built without {name}; build it with GGML_RPC=ON")

    @property
    def has_nextn(self) -> bool:
        """Whether this version of llama.cpp has all functions that drafts by MTP heads need."""
        fields = {field[0] for struct in (self.low.llama_model_params, self.low.llama_context_params)
                  for field in struct._fields_}  # fmt: skip
        return {"load_mtp", "ctx_type"} <= fields and None not in (self.set_nextn, self.nextn, self.nextn_row)

    def _bind_first(self, names: Sequence[str], result: Any, *arguments: Any) -> Any:
        """Return the C++ function whose mangled name is the first of `names` that is exported; None if none is."""
        for name in names:
            try:
                return self.bind(name, result, *arguments)
            except ImportError:
                continue
        return None

    def _bind_optional(self, name: str) -> Any:
        """Return the C++ function `name`, bound as a C function; None if it is not exported.

        The function must return an object. In the C++ ABI its first argument is a pointer to memory for this object.
        """
        try:
            return self.bind(name, None, _POINTER, _POINTER)
        except ImportError:
            return None


def _low_level() -> Any:
    """Return the binding's module of C functions, without running the `__init__` of its package.

    The `__init__` would import numpy, a template engine and more. They are not needed here, and their import took half
    of a probe's time.
    """
    # An empty module of the package's spec stands for the package, so that its submodule can be imported.
    name = "llama_cpp"
    if name not in sys.modules and (spec := util.find_spec(name)) is not None:
        sys.modules[name] = util.module_from_spec(spec)
    return import_module(f"{name}.llama_cpp")


def _libraries(low: Any) -> list[ctypes.CDLL]:
    """Return the library handles in which symbols are looked up: a single one on POSIX, on Windows one for each DLL."""
    if sys.platform != "win32":
        return [low._lib]
    folder = Path(low.__file__).parent / "lib"
    names = ("ggml.dll", "ggml-base.dll", "ggml-cpu.dll", "ggml-rpc.dll")
    return [low._lib, *(ctypes.CDLL(str(folder / name)) for name in names if (folder / name).exists())]


def _decoded(text: bytes | None) -> str:
    return (text or b"").decode("utf-8", "replace")
