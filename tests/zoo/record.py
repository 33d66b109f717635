"""Ask llama.cpp how much memory a GGUF needs per device, for many layouts.

Each *case* names a layout and the context options.  The library (the shared
libraries inside ``llama_cpp``) loads the model once per case, either without
allocating anything (``no_alloc``: works with header-only files) or for real
(``--real``: tiny models), and the memory breakdown of the context is written
as bytes per buffer type.  Devices are stand-ins, of three kinds:

``rpc``  RPC servers on loopback that this script starts as children and ends
         itself; what a user of RPC workers gets
``sim``  ``simdev.c``, compiled by the caller: devices which answer llama.cpp
         like CUDA ones (op offload, pinned host buffers, row padding, flash
         attention scratch), compute nothing and keep nothing; with
         LD_PRELOAD=libnopopulate.so (``nopopulate.c``) header-only models of
         any size load for real on them, memory-mapped
``vulkan``  one Vulkan device of the machine three times: an engine built with
       Vulkan, and a driver such as Mesa's llvmpipe, which needs no card
``cuda``  one NVIDIA card as three devices, which share its memory: an engine
       built with CUDA

    record.py cases MODEL.gguf...            show the cases chosen for a model
    record.py run -o truth/ MODEL.gguf...    write truth/<stem>.json
    record.py run --simdev ./libsimdev.so -o truth-sim/ MODEL.gguf...
    record.py run --vulkan -o truth-vulkan/ MODEL.gguf...
    record.py run --cuda -o truth-cuda/ MODEL.gguf...

RPC devices have no op-offload hook, so host weights are never copied to them
for large batches; both kinds report async and events, which turns pipeline
parallelism on under the usual conditions.

The breakdown call returns a C++ map by value; it is read here through its
memory layout, which holds for libstdc++ (Linux).  Needs ``llama_cpp`` built
with RPC.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gzip
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

STAND_INS = 3
SIMULATED_BYTES = 1 << 40
REAL_CPU_LIMIT_BYTES = 1 << 30
CASE_SECONDS = 120
CPU_PATTERN_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
SPLITS = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
FLASH = {"auto": -1, "off": 0, "on": 1}

CARDS = {"vulkan": b"Vulkan", "cuda": b"CUDA"}
"""How the names of a backend's devices begin."""
THREE_OF = {
    "vulkan": {"GGML_VK_VISIBLE_DEVICES": ",".join("0" * STAND_INS)},
    "cuda": {"CUDA_VISIBLE_DEVICES": "0", "GGML_CUDA_DEVICES": str(STAND_INS)},
}

DEFAULTS: dict[str, Any] = {
    "device_order": [0],  # stand-in numbers in the order given to llama.cpp; [] = CPU only
    "n_gpu_layers": 999,
    "tensor_split": None,  # weights per listed device; None = by free memory
    "split_mode": "layer",
    "n_ctx": 4096,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "kv_unified": False,
    "flash_attn": "auto",
    "type_k": "f16",
    "type_v": "f16",
    "offload_kqv": True,
    "op_offload": True,
    "swa_full": False,
    "overrides": [],  # [tensor name pattern, "CPU" or stand-in number]
}

# ggml buffer usages, as counted by simdev
USAGES = {"model": 1, "context": 0, "compute": 2}

LOAD_MODE_NONE, LOAD_MODE_MMAP = 0, 1

RESULT_MARK = "@@result "


# --------------------------------------------------------------------------- cases


def describe(path: Path) -> dict[str, Any]:
    """Return the few header facts that decide which cases make sense."""
    fields = read_metadata(path)
    architecture = fields["general.architecture"]

    def number(key: str, default: int = 0) -> int:
        value = fields.get(f"{architecture}.{key}", default)
        return int(max(value, default=0) if isinstance(value, list) else value)

    return {
        "file_bytes": path.stat().st_size,
        "architecture": architecture,
        "block_count": number("block_count"),
        "expert_count": number("expert_count"),
        "context_length": number("context_length", 4096),
        "sliding_window": number("attention.sliding_window"),
    }


# GGUF value type -> struct code; 8 is a string, 9 an array
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the key/value section of a GGUF file; arrays of text are skipped."""
    with path.open("rb") as file:

        def take(code: str) -> Any:
            return struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))[0]

        def text() -> str:
            return file.read(take("Q")).decode("utf-8", "replace")

        def value(kind: int) -> Any:
            if kind == 8:
                return text()
            if kind != 9:
                return take(SCALARS[kind])
            inner, count = take("I"), take("Q")
            if inner != 8:
                return [take(SCALARS[inner]) for _ in range(count)]
            for _ in range(count):
                file.seek(take("Q"), os.SEEK_CUR)
            return None

        magic, _version, _tensors, pairs = file.read(4), take("I"), take("Q"), take("Q")
        if magic != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file")
        return {text(): value(take("I")) for _ in range(pairs)}


def choose_cases(facts: dict[str, Any], *, tiny: bool = False) -> list[dict[str, Any]]:
    """Return the named cases for one model; options not given are ``DEFAULTS``."""
    blocks = facts["block_count"]
    long_context = min(facts["context_length"], 32768)
    small = {"n_ctx": min(facts["context_length"], 512)} if tiny else {}
    cases: list[dict[str, Any]] = [
        {"name": "cpu-only", "device_order": [], "n_gpu_layers": 0},
        {"name": "one-device-full"},
        {"name": "two-devices-uneven-3-1", "device_order": [0, 1], "tensor_split": [3, 1]},
        {"name": "two-devices-swapped-order-1-2", "device_order": [1, 0], "tensor_split": [1, 2]},
        {"name": "three-devices-5-2-3", "device_order": [0, 1, 2], "tensor_split": [5, 2, 3]},
        {"name": "partial-half-on-one-device", "n_gpu_layers": blocks // 2},
        {
            "name": "partial-two-devices-4-1",
            "device_order": [0, 1],
            "tensor_split": [4, 1],
            "n_gpu_layers": max(1, blocks * 3 // 4),
        },
        {"name": "first-block-on-cpu", "n_gpu_layers": blocks},
        {
            "name": "kv-q8_0-flash-on",
            "flash_attn": "on",
            "type_k": "q8_0",
            "type_v": "q8_0",
            "device_order": [0, 1],
            "tensor_split": [1, 1],
        },
        {"name": "flash-off", "flash_attn": "off"},
        {"name": "flash-off-two-devices", "flash_attn": "off", "device_order": [0, 1], "tensor_split": [2, 3]},
        {"name": "ubatch-2048", "n_ubatch": 2048},
        {"name": "ubatch-128-batch-256", "n_batch": 256, "n_ubatch": 128},
        {"name": "kv-on-cpu", "offload_kqv": False},
        {"name": "four-sequences", "n_seq_max": 4},
        {
            "name": "four-sequences-unified",
            "n_seq_max": 4,
            "kv_unified": True,
            "device_order": [0, 1],
            "tensor_split": [1, 1],
        },
        {
            "name": "tensor-split-mode-2",
            "split_mode": "tensor",
            "device_order": [0, 1],
            "tensor_split": [1, 1],
            "flash_attn": "on",
        },
        {
            "name": "tensor-split-mode-3-uneven",
            "split_mode": "tensor",
            "device_order": [0, 1, 2],
            "tensor_split": [2, 1, 1],
            "flash_attn": "on",
        },
    ]
    if not tiny:
        cases += [
            {"name": "long-context", "n_ctx": long_context},
            {
                "name": "long-context-three-devices",
                "n_ctx": long_context,
                "device_order": [0, 1, 2],
                "tensor_split": [1, 1, 1],
            },
            {
                "name": "kv-q8_0-longest-context-two-devices",
                "n_ctx": min(facts["context_length"], 131072),
                "flash_attn": "on",
                "type_k": "q8_0",
                "type_v": "q8_0",
                "device_order": [0, 1],
                "tensor_split": [1, 1],
            },
            {"name": "context-odd-5000", "n_ctx": 5000, "device_order": [0, 1], "tensor_split": [1, 1]},
        ]
    if facts["sliding_window"]:
        cases.append({"name": "swa-full", "swa_full": True, "n_ctx": long_context})
    if facts["expert_count"]:
        cases += [
            {"name": "experts-on-cpu", "overrides": [[CPU_PATTERN_EXPERTS, "CPU"]]},
            {
                "name": "experts-of-first-half-on-cpu",
                "device_order": [0, 1],
                "tensor_split": [1, 1],
                "overrides": [[rf"blk\.{i}\.ffn_(up|down|gate|gate_up)_(ch|)exps", "CPU"] for i in range(blocks // 2)],
            },
        ]
    return [{**small, **case} for case in cases]


def cases_like(name: str) -> list[dict[str, Any]]:
    """Return the cases that were recorded for the model ``name``, for one with as many layers.

    What the engine makes besides the file's layers goes with the last of them in our layouts, which
    the cases chosen by layer counts do not know.
    """
    packed = gzip.decompress((Path(__file__).parent / "truth" / f"{name}.json.gz").read_bytes())
    options = ("name", *DEFAULTS)
    found = [{key: case[key] for key in options if key in case} for case in json.loads(packed)["cases"]]
    return list({case["name"]: case for case in found}.values())


def layout_cases(facts: dict[str, Any], *, tiny: bool = False) -> list[dict[str, Any]]:
    """Return cases with CPU entries, outputs elsewhere, repeated workers, overrides to devices and all KV types.

    Shares are layer counts whose sum is the number of offloaded positions, which the engine follows exactly.
    """
    blocks = facts["block_count"]
    positions = blocks + 1
    small = {"n_ctx": min(facts["context_length"], 512)} if tiny else {}
    third, half = max(1, positions // 3), max(1, positions // 2)
    cases: list[dict[str, Any]] = [
        {"name": "cpu-entry-last", "device_order": [0, "CPU"], "tensor_split": [half, positions - half]},
        {"name": "output-on-cpu", "device_order": [0, "CPU"], "tensor_split": [blocks, 1]},
        {"name": "output-on-second", "device_order": [0, 1], "tensor_split": [blocks, 1]},
        {
            "name": "leading-cpu-output-on-cpu",
            "device_order": [0, "CPU"],
            "tensor_split": [blocks - 1, 1],
            "n_gpu_layers": blocks,
        },
        {
            "name": "override-to-device",
            "device_order": [0, 1],
            "tensor_split": [positions, 0],
            "overrides": [[r"^blk\.0\.ffn_", 1]],
        },
        {
            "name": "override-to-cpu-and-device",
            "device_order": [0, 1],
            "tensor_split": [half, positions - half],
            "overrides": [[r"^blk\.(0|1)\.attn_", "CPU"], [r"\.ffn_down", 1]],
        },
        {"name": "four-sequences-unified-one-device", "n_seq_max": 4, "kv_unified": True},
        {"name": "three-sequences-odd-context", "n_seq_max": 3, "n_ctx": 700 if tiny else 5000, "n_ubatch": 96},
    ]
    if positions > 2:
        cases += [
            {
                "name": "cpu-entry-between",
                "device_order": [0, "CPU", 1],
                "tensor_split": [third, third, positions - 2 * third],
            },
            {
                "name": "repeated-worker",
                "device_order": [0, 1, 0],
                "tensor_split": [third, third, positions - 2 * third],
            },
        ]
    if positions > 3:
        cases.append(
            {
                "name": "leading-cpu-and-cpu-entry",
                "device_order": [0, "CPU", 1],
                "tensor_split": [1, 1, blocks - 2],
                "n_gpu_layers": blocks,
            }
        )
    cases += [
        {"name": f"kv-{kind}", "flash_attn": "on", "type_k": kind, "type_v": kind}
        for kind in ("f32", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")
    ]
    if facts["sliding_window"]:
        cases += [
            {"name": "swa-full-unified", "swa_full": True, "n_seq_max": 2, "kv_unified": True},
            {"name": "swa-large-batch", "n_ubatch": 1024, "n_ctx": 700 if tiny else 9000},
        ]
    return [{**small, **case} for case in cases]


# --------------------------------------------------------------------------- library


class MemoryData(ctypes.Structure):
    """``llama_memory_breakdown_data``: bytes for one buffer type."""

    _fields_ = [("model", ctypes.c_size_t), ("context", ctypes.c_size_t), ("compute", ctypes.c_size_t)]


class MapNode(ctypes.Structure):
    """A libstdc++ ``_Rb_tree_node`` holding (buffer type, MemoryData)."""

    _fields_ = [
        ("color", ctypes.c_size_t),
        ("parent", ctypes.c_void_p),
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", MemoryData),
    ]


class Map(ctypes.Structure):
    """A libstdc++ ``std::map`` object."""

    _fields_ = [
        ("compare", ctypes.c_size_t),
        ("color", ctypes.c_size_t),
        ("root", ctypes.c_void_p),
        ("leftmost", ctypes.c_void_p),
        ("rightmost", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("spare", ctypes.c_size_t * 4),
    ]


def walk_map(node_address: int | None) -> Iterator[tuple[int, MemoryData]]:
    """Yield (buffer type address, data) in key order."""
    if not node_address:
        return
    node = MapNode.from_address(node_address)
    yield from walk_map(node.left)
    yield node.key, node.value
    yield from walk_map(node.right)


def load_library(folder: Path, name: str) -> ctypes.CDLL:
    """Load the very file that the other libraries link to.

    Wheels hold copies instead of symbolic links; ``libX.so`` next to ``libX.so.0``
    would be a second instance with its own device registry and buffer types.
    """
    linked = sorted(folder.glob(f"lib{name}.so.[0-9]"))
    return ctypes.CDLL(str(linked[0] if linked else folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)


class Library:
    """The llama.cpp shared libraries with the RPC stand-ins registered."""

    def __init__(self, endpoints: Sequence[str], simdev: str | None, *, card: str | None = None) -> None:
        import llama_cpp
        from llama_cpp import llama_cpp as low

        self.low = low
        folder = Path(llama_cpp.__file__).parent / "lib"
        base = load_library(folder, "ggml-base")
        ggml = load_library(folder, "ggml")
        rpc = load_library(folder, "ggml-rpc")
        llama = load_library(folder, "llama")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t

        def bind(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
            function = getattr(library, name)
            function.restype, function.argtypes = result, list(arguments)
            return function

        self.buffer_type_name = bind(base, "ggml_backend_buft_name", ctypes.c_char_p, pointer)
        self.buffer_type_is_host = bind(base, "ggml_backend_buft_is_host", ctypes.c_bool, pointer)
        self.buffer_type_device = bind(base, "ggml_backend_buft_get_device", pointer, pointer)
        self.device_buffer_type = bind(base, "ggml_backend_dev_buffer_type", pointer, pointer)
        self.cpu_buffer_type = bind(base, "ggml_backend_cpu_buffer_type", pointer)
        cpu_by_type = bind(ggml, "ggml_backend_dev_by_type", pointer, ctypes.c_int)
        self.cpu_device: Any = lambda: cpu_by_type(0)
        self.breakdown = bind(llama, "_Z26llama_get_memory_breakdownPK13llama_context", None, pointer, pointer)
        add_server = bind(rpc, "ggml_backend_rpc_add_server", pointer, ctypes.c_char_p)
        register = bind(ggml, "ggml_backend_register", None, pointer)
        device_get = bind(base, "ggml_backend_reg_dev_get", pointer, pointer, size)

        self.log: list[str] = []
        self.on_log = low.llama_log_callback(
            lambda _level, text, _data: self.log.append(text.decode("utf-8", "replace"))
        )
        low.llama_log_set(self.on_log, pointer(0))
        low.llama_backend_init()
        self.endpoints = endpoints
        self.stand_ins: list[int] = []
        if simdev:
            make = bind(ctypes.CDLL(simdev), "simdev_registry", pointer, size, size)
            registry = make(STAND_INS, SIMULATED_BYTES)
            register(registry)
            self.stand_ins = [device_get(registry, number) for number in range(STAND_INS)]
        if card:
            count = bind(ggml, "ggml_backend_dev_count", size)
            each = bind(ggml, "ggml_backend_dev_get", pointer, size)
            name = bind(base, "ggml_backend_dev_name", ctypes.c_char_p, pointer)
            devices = [each(number) for number in range(count())]
            self.stand_ins = [device for device in devices if name(device).startswith(CARDS[card])]
        self.maps_real_loads = bool(simdev) or card == "cuda"
        self.simulated_bytes = bind(ctypes.CDLL(simdev), "simdev_bytes", size, size, ctypes.c_int) if simdev else None
        for endpoint in endpoints:
            registry = add_server(endpoint.encode())
            register(registry)
            self.stand_ins.append(device_get(registry, 0))

    def measure(self, path: Path, case: dict[str, Any], *, real: bool) -> dict[str, Any]:
        """Load one model with one case and return its breakdown."""
        options = {**DEFAULTS, **case}
        self.log.clear()
        keep: list[Any] = []
        started = time.monotonic()
        model = self.low.llama_model_load_from_file(str(path).encode(), self._model_parameters(options, keep, real))
        if not model:
            return self._failure("model not loaded")
        try:
            return self._measure_context(model, options, started)
        finally:
            self.low.llama_model_free(model)

    def _measure_context(self, model: Any, options: dict[str, Any], started: float) -> dict[str, Any]:
        context = self.low.llama_init_from_model(model, self._context_parameters(options))
        if not context:
            return self._failure("context not created")
        result = self._result(context)
        result["seconds"] = round(time.monotonic() - started, 3)
        self.low.llama_free(context)
        return result

    def _model_parameters(self, options: dict[str, Any], keep: list[Any], real: bool) -> Any:
        low: Any = self.low
        parameters = low.llama_model_default_params()
        chosen = [
            self.cpu_device() if number == "CPU" else self.stand_ins[number] for number in options["device_order"]
        ]
        devices = (ctypes.c_void_p * (len(chosen) + 1))(*chosen, None)
        keep.append(devices)
        parameters.devices = ctypes.addressof(devices)
        parameters.n_gpu_layers = options["n_gpu_layers"]
        parameters.split_mode = SPLITS[options["split_mode"]]
        parameters.no_alloc = not real
        parameters.load_mode = LOAD_MODE_MMAP if real and self.maps_real_loads else LOAD_MODE_NONE
        if options["tensor_split"]:
            split = (ctypes.c_float * self.low.llama_max_devices())(*options["tensor_split"])
            keep.append(split)
            parameters.tensor_split = split
        if options["overrides"]:
            flat: list[Any] = []
            for pattern, target in options["overrides"]:
                text = ctypes.c_char_p(pattern.encode())
                keep.append(text)
                buffer_type = (
                    self.cpu_buffer_type() if target == "CPU" else self.device_buffer_type(self.stand_ins[target])
                )
                flat += [ctypes.cast(text, ctypes.c_void_p).value, buffer_type]
            table = (ctypes.c_void_p * (len(flat) + 2))(*flat, None, None)
            keep.append(table)
            parameters.tensor_buft_overrides = ctypes.addressof(table)
        return parameters

    def _context_parameters(self, options: dict[str, Any]) -> Any:
        low: Any = self.low
        parameters = low.llama_context_default_params()
        for name in (
            "n_ctx",
            "n_batch",
            "n_ubatch",
            "n_seq_max",
            "kv_unified",
            "offload_kqv",
            "op_offload",
            "swa_full",
        ):
            setattr(parameters, name, options[name])
        parameters.flash_attn_type = FLASH[options["flash_attn"]]
        parameters.type_k, parameters.type_v = TYPES[options["type_k"]], TYPES[options["type_v"]]
        parameters.n_threads = parameters.n_threads_batch = 2
        return parameters

    def _result(self, context: Any) -> dict[str, Any]:
        space = Map()
        self.breakdown(ctypes.addressof(space), context)
        host = {"model": 0, "context": 0, "compute": 0}
        devices: dict[str, dict[str, int]] = {}
        by_type: dict[str, dict[str, Any]] = {}
        for address, data in walk_map(space.root):
            numbers = {"model": data.model, "context": data.context, "compute": data.compute}
            owner = self.buffer_type_device(address)
            name = self.buffer_type_name(address).decode()
            on_device = owner in self.stand_ins and not self.buffer_type_is_host(address)
            where = str(self.stand_ins.index(owner)) if on_device else "host"
            if name.startswith("Meta"):
                where = "meta"
            by_type[self._plain(name)] = {"device": where, **numbers}
            target = host if where == "host" else devices.setdefault(where, dict.fromkeys(host, 0))
            for key, value in numbers.items():
                target[key] += value
        if self.simulated_bytes and "meta" in devices:
            for number in range(STAND_INS):
                kept = {key: self.simulated_bytes(number, usage) for key, usage in USAGES.items()}
                if any(kept.values()):
                    devices[str(number)] = kept
        return {"devices": devices, "host": host, "by_buffer_type": by_type, "log": self._facts()}

    def _plain(self, name: str) -> str:
        """Replace the endpoint of a stand-in by its number."""
        for number, endpoint in enumerate(self.endpoints):
            name = name.replace(endpoint, f"device{number}")
        return name

    def _facts(self) -> dict[str, Any]:
        """Pick what the log alone tells: output buffer, effective sizes, flash attention."""
        text = self._plain("".join(self.log))
        facts: dict[str, Any] = {
            "buffer_lines": [
                " ".join(line.split(":", 1)[-1].split()) for line in text.splitlines() if "buffer size =" in line
            ]
        }
        for key in ("n_ctx", "n_ctx_seq", "n_batch", "n_ubatch", "flash_attn", "n_seq_max"):
            hit = re.search(rf"llama_context: {key}\s*= (\S+)", text)
            if hit:
                facts[key] = hit[1]
        for key, pattern in (
            ("flash_auto", r"Flash Attention was auto, set to (\w+)"),
            ("graph_splits", r"graph splits = (.+)"),
            ("graph_nodes", r"graph nodes\s*= (.+)"),
            ("offloaded", r"offloaded (\S+) layers"),
        ):
            hit = re.search(pattern, text)
            if hit:
                facts[key] = hit[1]
        facts["pipeline_parallel"] = "pipeline parallelism enabled" in text
        return facts

    def _failure(self, what: str) -> dict[str, Any]:
        lines = [
            line.strip()
            for line in "".join(self.log).splitlines()
            if re.search(r"error|fail|not supported|requires|not implemented", line, re.I)
        ]
        return {"error": what, "reason": lines[-3:]}


# --------------------------------------------------------------------------- processes


def serve(port: int) -> None:
    """Run one RPC stand-in until the process is ended (child process entry)."""
    import llama_cpp

    folder = Path(llama_cpp.__file__).parent / "lib"
    rpc = load_library(folder, "ggml-rpc")
    ggml = load_library(folder, "ggml")
    ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    devices = (ctypes.c_void_p * 1)(ggml.ggml_backend_dev_by_type(0))
    rpc.ggml_backend_rpc_start_server.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_void_p,
    ]
    rpc.ggml_backend_rpc_start_server(f"127.0.0.1:{port}".encode(), None, 1, 1, devices)


@contextlib.contextmanager
def stand_ins(python: Path) -> Iterator[list[str]]:
    """Start the RPC stand-ins and end them on exit, each by its own process handle."""
    children = []
    ports = _free_ports(STAND_INS)
    try:
        for port in ports:
            children.append(
                subprocess.Popen(
                    [str(python), __file__, "serve", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )
        for port in ports:
            _wait_for(port)
        yield [f"127.0.0.1:{port}" for port in ports]
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait(10)


def _free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody listens on; held until all are chosen, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"stand-in on port {port} did not answer")


class Engine(Struct, frozen=True, dict=True):
    """Which engine is asked: the interpreter that has it, and the compiled `simdev.c` and `nopopulate.c`, if any;
    `card`: the backend, "vulkan" or "cuda", whose first device of the machine is used three times.

    Without `preload` the children have what this process was started with.
    """

    python: Path
    simdev: Path | None = None
    preload: Path | None = None
    card: str | None = None

    @property
    def kind(self) -> str:
        """What the stand-ins are called in records."""
        return self.card or ("rpc" if self.simdev is None else "sim")

    def environment(self) -> dict[str, str]:
        """Return what the children are started with."""
        preload = {} if self.preload is None else {"LD_PRELOAD": str(self.preload)}
        return {**os.environ, **preload, **(THREE_OF[self.card] if self.card else {})}


def measure_cases(path: Path, cases: Sequence[dict[str, Any]], engine: Engine, *, real: bool) -> list[dict[str, Any]]:
    """Run the cases in child processes; a native abort costs one case only."""
    results: list[dict[str, Any]] = []
    pending = list(cases)
    servers: contextlib.AbstractContextManager[list[str]] = (
        stand_ins(engine.python) if engine.kind == "rpc" else contextlib.nullcontext([])
    )
    with servers as endpoints:
        while pending:
            done = _run_worker(path, pending, endpoints, real, engine)
            results += done
            pending = pending[len(done) :]
    return results


def _run_worker(
    path: Path, cases: list[dict[str, Any]], endpoints: list[str], real: bool, engine: Engine
) -> list[dict[str, Any]]:
    simdev = None if engine.simdev is None else str(engine.simdev)
    request = json.dumps(
        {
            "path": str(path),
            "cases": cases,
            "endpoints": endpoints,
            "real": real,
            "simdev": simdev,
            "card": engine.card,
        }
    )
    child = subprocess.Popen(
        [str(engine.python), __file__, "worker"],
        env=engine.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = child.communicate(request, timeout=CASE_SECONDS * len(cases))
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
    done = [json.loads(line[len(RESULT_MARK) :]) for line in out.splitlines() if line.startswith(RESULT_MARK)]
    results = [{**case, **result} for case, result in zip(cases, done, strict=False)]
    if len(done) < len(cases):
        ended = signal.Signals(-child.returncode).name if child.returncode < 0 else f"exit {child.returncode}"
        asserts = [line for line in err.splitlines() if "GGML_ASSERT" in line or "what()" in line]
        asserts = [re.sub(r"\S*/", "", line) for line in asserts]
        results.append({**cases[len(done)], "error": f"process ended: {ended}", "reason": asserts[-2:]})
    return results


def work() -> None:
    """Measure the cases given on standard input (child process entry)."""
    request = json.load(sys.stdin)
    library = Library(request["endpoints"], request["simdev"], card=request["card"])
    for case in request["cases"]:
        result = library.measure(Path(request["path"]), case, real=request["real"])
        print(RESULT_MARK + json.dumps(result), flush=True)
    sys.stdout.flush()
    os._exit(0)


# --------------------------------------------------------------------------- commands


def run(
    paths: Sequence[Path],
    out: Path,
    *,
    real: bool,
    tiny: bool,
    real_only: bool,
    wanted: str | None,
    engine: Engine,
    layouts: bool,
    like: str | None,
) -> None:
    """Write one JSON file per model."""
    out.mkdir(parents=True, exist_ok=True)
    for path in paths:
        facts = describe(path)
        if like is not None:
            chosen = cases_like(like)
        else:
            chosen = layout_cases(facts, tiny=tiny) if layouts else choose_cases(facts, tiny=tiny)
        cases = [case for case in chosen if not wanted or re.search(wanted, case["name"])]
        started = time.monotonic()
        dry = measure_cases(path, cases, engine, real=False) if not real_only else []
        record: dict[str, Any] = {
            "model": path.name,
            **facts,
            "unit": "bytes",
            "stand_ins": engine.kind,
            "defaults": DEFAULTS,
            "no_alloc": dry,
        }
        if real:
            # a CPU-only load repacks the weights into RAM, so big models skip it
            small = facts["file_bytes"] <= REAL_CPU_LIMIT_BYTES
            loaded = [case for case in cases if small or case.get("device_order") != []]
            record["real"] = measure_cases(path, loaded, engine, real=True)
        text = json.dumps(record, indent=1)
        text = re.sub(r"\{\s+([^{}\[\]]*?)\s+\}", lambda hit: "{" + re.sub(r"\s+", " ", hit[1]) + "}", text)
        (out / f"{path.stem}.json").write_text(text + "\n")
        done = dry + record.get("real", [])
        good = sum("error" not in case for case in done)
        print(f"{path.stem:44s} {good}/{len(done)} loads {time.monotonic() - started:6.1f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "cases"):
        command = commands.add_parser(name)
        command.add_argument("models", nargs="+", type=Path)
        command.add_argument(
            "--real", action="store_true", help="also load for real (any size with --simdev, else small models)"
        )
        command.add_argument("--real-only", action="store_true", help="with --real: leave the no-alloc part out")
        command.add_argument("--tiny", action="store_true", help="cases for models with a training context of 256")
        command.add_argument("-o", "--out", type=Path, default=Path("truth"))
        command.add_argument(
            "--simdev", type=Path, help="path of the compiled simdev.c; without it RPC stand-ins are used"
        )
        for card in CARDS:
            words = f"use the machine's first {card} device three times"
            command.add_argument(f"--{card}", action="store_const", dest="card", const=card, help=words)
        command.add_argument("--layouts", action="store_true", help="the cases with CPU entries and the like")
        command.add_argument("--like", metavar="NAME", help="the cases of a model of the zoo with as many layers")
        command.add_argument("--only", help="regular expression on case names")
    commands.add_parser("serve").add_argument("port", type=int)
    commands.add_parser("worker")
    options = parser.parse_args(arguments)
    if options.command == "serve":
        serve(options.port)
    elif options.command == "worker":
        work()
    elif options.command == "cases":
        for path in options.models:
            print(json.dumps({path.name: choose_cases(describe(path), tiny=options.tiny)}, indent=1))
    else:
        run(
            options.models,
            options.out,
            real=options.real,
            tiny=options.tiny,
            real_only=options.real_only,
            wanted=options.only,
            engine=Engine(Path(sys.executable), options.simdev, card=options.card),
            layouts=options.layouts,
            like=options.like,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
