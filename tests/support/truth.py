"""Recorded memory numbers of llama.cpp (`tests/zoo`), as models, layouts, settings and bytes."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct

from engine.base.values import replace
from engine.devices.device import CPU_ID, BufferFacts, Device, Rig, make_host
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.engine_parameters import MAX_DEVICES, EngineParameters, entries
from engine.planning.layout.layout import Layout, Override, Run, SplitMode
from engine.planning.layout.split_modes import count_unlisted_layers
from engine.planning.memory.kv_cache import context_shape
from engine.planning.settings.context_settings import ContextSettings
from tests.support.engine_split import assignment_of
from tests.support.headers import write_with_hole
from tests.zoo.pack import FOLDER, read_document
from tests.zoo.record import DEFAULTS

MODEL_NAMES = tuple(sorted(path.name.removesuffix(".json.gz") for path in (FOLDER / "truth").iterdir()))
_LARGE_BYTES = 1 << 28

_CONTEXT_KEYS = ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "type_k", "type_v", "flash_attn", "offload_kqv",
                 "op_offload", "swa_full", "kv_unified")  # fmt: skip
_TIB = 1 << 40


class Measured(Struct, frozen=True):
    """Bytes that llama.cpp counts on one device.

    `weights_bytes`: on the host including the mapped part of the file.
    `state_bytes`: KV cache and recurrent state.
    `repacked_bytes`: on the host the part of the weights that is a repacked copy.
    """

    weights_bytes: int
    state_bytes: int
    compute_bytes: int
    repacked_bytes: int = 0


class TruthCase(Struct, frozen=True):
    """One recorded load of one model, with the bytes that llama.cpp counted on each of our devices.

    `refused`: why llama.cpp refused the load; `measured` is then empty.
    `compares_devices`: whether each device was counted separately. In mode tensor RPC workers and dry runs are not.
    `lists_idle_devices`: whether llama.cpp got a device without layers, as none of our layouts has. It takes part in
    pipeline parallelism.
    `largest`: the most that any member of a tensor split holds, if llama.cpp tells only that.
    """

    name: str
    model: ModelFile
    rig: Rig
    layout: Layout
    context: ContextSettings
    pipeline: bool
    measured: dict[str, Measured]
    refused: str | None = None
    compares_devices: bool = True
    is_real: bool = False
    lists_idle_devices: bool = False
    largest: Measured | None = None

    @property
    def maps_file(self) -> bool:
        return self.context.load_mode == "mmap"


@cache
def truth_model(name: str) -> ModelFile:
    """Return a recorded model, read from its header."""
    header = gzip.decompress((FOLDER / "headers" / f"{name}.gguf.head.gz").read_bytes())
    with TemporaryDirectory() as folder:
        return read_model(write_with_hole(Path(folder) / f"{name}.gguf", header, _document(name)["size_bytes"]))


def truth_cases(name: str) -> list[TruthCase]:
    """Return every recorded load of a model."""
    model = truth_model(name)
    return [case_of(model, {**DEFAULTS, **raw}) for raw in _document(name)["cases"]]


@cache
def _document(name: str) -> dict[str, Any]:
    return read_document(name)


KNOWN_MODEL_NAMES = tuple(name for name in MODEL_NAMES if _document(name)["size_bytes"] > _LARGE_BYTES)
"""Well-known models, with buffers of realistic size; all others are small."""

CUDA_MODEL_NAMES = tuple(
    name
    for name in MODEL_NAMES
    if any((case["stand_ins"], case["load"]) == ("cuda", "real") for case in _document(name)["cases"])
)
"""Models whose compute buffers on CUDA differ from those of `sim`: with experts, or with an IQ4_NL cache."""


def case_of(model: ModelFile, raw: dict[str, Any]) -> TruthCase:
    """Return a recorded case of `model`. Fields missing in the record have their defaults."""
    # Stand-ins that compute nothing were loaded with the file mapped; everything else was not.
    maps = raw["stand_ins"] in ("sim", "cuda") and raw["load"] == "real"
    options = {key: raw[key] for key in _CONTEXT_KEYS}
    context = ContextSettings(**options, load_mode="mmap" if maps else "none", pipeline="on")
    refused = "error" in raw
    numbers = [] if refused else [number for number in raw["devices"] if number != "meta"]
    measured = {} if refused else {CPU_ID: Measured(*raw["host"])}
    measured |= {_id(number): Measured(*raw["devices"][number]) for number in numbers}
    pipeline = not refused and raw["pipeline"]
    if pipeline and raw["load"] == "no_alloc":
        _correct_dry_run(measured, model, context, _id(raw["device_order"][0]))
    layout = layout_of(model, raw)
    has_largest = not refused and raw["load"] == "real" and "meta" in raw["devices"]
    listed = [_id(number) for number in raw["device_order"]]
    used = [run.device for run in entries(layout)]
    return TruthCase(
        name=f"{raw['stand_ins']} {raw['load']} {raw['name']}",
        model=model,
        rig=stand_in_rig(raw["stand_ins"]),
        layout=layout,
        context=context,
        pipeline=pipeline,
        measured=measured,
        refused=" ".join([raw["error"], *raw["reason"]]) if refused else None,
        compares_devices=raw["split_mode"] == "layer" or maps,
        is_real=raw["load"] == "real",
        largest=Measured(*raw["devices"]["meta"]) if has_largest else None,
        lists_idle_devices=raw["split_mode"] == "layer" and raw["n_gpu_layers"] > 0 and listed != used,
    )


def _correct_dry_run(measured: dict[str, Measured], model: ModelFile, context: ContextSettings, first: str) -> None:
    n_embd = model.hyper_parameter("embedding_length")
    assert isinstance(n_embd, int)
    surplus_bytes = 4 * n_embd * context_shape(context, context.n_ctx).n_ubatch * 4
    for device_id, sizes in measured.items():
        if device_id not in (CPU_ID, first):
            compute_bytes = sizes.compute_bytes - surplus_bytes
            measured[device_id] = Measured(sizes.weights_bytes, sizes.state_bytes, compute_bytes)


def layout_of(model: ModelFile, raw: dict[str, Any]) -> Layout:
    """Return the layout that corresponds to the recorded llama.cpp parameters."""
    ids = tuple(_id(number) for number in raw["device_order"])
    shares = [float(share) for share in raw["tensor_split"] or [1.0] * len(ids)]
    mode: SplitMode = raw["split_mode"]
    n_made = model.n_layers + count_unlisted_layers(model)
    parameters = EngineParameters(
        n_gpu_layers=min(raw["n_gpu_layers"], n_made + 1),
        devices=ids,
        tensor_split=tuple(shares + [0.0] * (MAX_DEVICES - len(shares))),
        split_mode="layer",
    )
    *layers, output = assignment_of(parameters, n_made)
    del layers[model.n_layers :]
    if mode == "tensor":
        layers, output = [ids[0] if device != CPU_ID else CPU_ID for device in layers], ids[0]
    runs: list[Run] = []
    for index, device in enumerate(layers):
        if runs and runs[-1].device == device:
            runs[-1] = Run(device, runs[-1].first, index)
        else:
            runs.append(Run(device, index, index))
    overrides = tuple(Override(_id(target), pattern=pattern) for pattern, target in raw["overrides"])
    split = tuple(zip(ids, shares, strict=True)) if mode == "tensor" else ()
    return Layout(model.n_layers, tuple(runs), output, mode, split, overrides=overrides)


def _id(number: int | str) -> str:
    return CPU_ID if number == "CPU" else f"D{number}"


_BACKENDS = {"rpc": "RPC", "sim": "CUDA", "cuda": "CUDA", "vulkan": "Vulkan"}


def stand_in_rig(stand_ins: str) -> Rig:
    """Return the rig on which cases were recorded. `stand_ins`: "rpc", "sim", "cuda" or "vulkan"."""
    is_rpc = stand_ins == "rpc"
    devices = tuple(
        Device(
            id=_id(number),
            name="stand-in",
            backend=_BACKENDS[stand_ins],
            kind="gpu",
            total_bytes=_TIB,
            endpoint=f"127.0.0.1:{50152 + number}" if is_rpc else None,
        )
        for number in range(3)
    )
    if stand_ins == "vulkan":
        devices = tuple(map(_like_llvmpipe, devices))
    return Rig(devices, make_host("host", _TIB))


def _like_llvmpipe(device: Device) -> Device:
    """Return `device` with the properties of Mesa's llvmpipe 22.3, on which the Vulkan cases were recorded."""
    return replace(device, buffers=BufferFacts(16, 64, largest_tensor_bytes=1 << 27, mixes_streams=False))
