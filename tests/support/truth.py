"""The engine's own memory numbers (`tests/data/truth`) as models, layouts, settings and bytes to compare with."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.gguf.model_file import ModelFile
from engine.gguf.reader import read_model
from engine.layout.context_settings import ContextSettings
from engine.layout.engine_parameters import MAX_DEVICES, EngineParameters, assignment_of
from engine.layout.layout import Layout, Override, Run
from engine.memory.kv_cache import context_shape
from tests.support.headers import write_with_hole

_FOLDER = Path(__file__).parents[1] / "data" / "truth"
MODEL_NAMES = tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))
KNOWN_MODEL_NAMES = tuple(name for name in MODEL_NAMES if name[-1] == "b")
"""The well-known models, whose buffers are as large as people's; the others are small."""

_DEFAULTS: dict[str, Any] = {
    "device_order": [0],
    "n_gpu_layers": 999,
    "tensor_split": None,
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
    "overrides": [],
}
_CONTEXT_KEYS = ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "type_k", "type_v", "flash_attn", "offload_kqv",
                 "op_offload", "swa_full", "kv_unified")  # fmt: skip
_TIB = 1 << 40


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes that the engine counts on one device. `weights_bytes` of the host includes its mapped file span."""

    weights_bytes: int
    kv_cache_bytes: int
    compute_bytes: int


@dataclass(frozen=True, slots=True)
class TruthCase:
    """One load of one model: what was asked for and what the engine counted, by our device id."""

    name: str
    model: ModelFile
    rig: Rig
    layout: Layout
    context: ContextSettings
    pipeline: bool
    measured: dict[str, Measured]


@cache
def truth_model(name: str) -> ModelFile:
    """Return one of the recorded models, read from its header."""
    header = gzip.decompress((_FOLDER / f"{name}.gguf.head.gz").read_bytes())
    with TemporaryDirectory() as folder:
        return read_model(write_with_hole(Path(folder) / f"{name}.gguf", header, _document(name)["size_bytes"]))


def truth_cases(name: str) -> list[TruthCase]:
    """Return every recorded load of a model."""
    model = truth_model(name)
    return [_case(model, {**_DEFAULTS, **raw}) for raw in _document(name)["cases"]]


@cache
def _document(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return document


def _case(model: ModelFile, raw: dict[str, Any]) -> TruthCase:
    # Stand-ins that compute nothing were loaded with the file mapped; everything else was not.
    maps = raw["stand_ins"] == "sim" and raw["load"] == "real"
    options = {key: raw[key] for key in _CONTEXT_KEYS}
    context = ContextSettings(**options, load_mode="mmap" if maps else "none")
    measured = {CPU_ID: Measured(*raw["host"])}
    measured |= {_id(number): Measured(*sizes) for number, sizes in raw["devices"].items()}
    if raw["pipeline"] and raw["load"] == "no_alloc":
        _correct_dry_run(measured, model, context, _id(raw["device_order"][0]))
    return TruthCase(
        name=f"{raw['stand_ins']} {raw['load']} {raw['name']}",
        model=model,
        rig=_rig(raw["stand_ins"]),
        layout=_layout(model, raw),
        context=context,
        pipeline=raw["pipeline"],
        measured=measured,
    )


def _correct_dry_run(measured: dict[str, Measured], model: ModelFile, context: ContextSettings, first: str) -> None:
    n_embd = model.hyper_parameter("embedding_length")
    assert isinstance(n_embd, int)
    surplus_bytes = 4 * n_embd * context_shape(context, context.n_ctx).n_ubatch * 4
    for device_id, sizes in measured.items():
        if device_id not in (CPU_ID, first):
            compute_bytes = sizes.compute_bytes - surplus_bytes
            measured[device_id] = Measured(sizes.weights_bytes, sizes.kv_cache_bytes, compute_bytes)


def _layout(model: ModelFile, raw: dict[str, Any]) -> Layout:
    ids = tuple(_id(number) for number in raw["device_order"])
    shares = [float(share) for share in raw["tensor_split"] or [1.0] * len(ids)]
    parameters = EngineParameters(
        n_gpu_layers=min(raw["n_gpu_layers"], model.n_layers + 1),
        devices=ids,
        tensor_split=tuple(shares + [0.0] * (MAX_DEVICES - len(shares))),
        split_mode="layer",
    )
    *layers, output = assignment_of(parameters, model.n_layers)
    runs: list[Run] = []
    for index, device in enumerate(layers):
        if runs and runs[-1].device == device:
            runs[-1] = Run(device, runs[-1].first, index)
        else:
            runs.append(Run(device, index, index))
    overrides = tuple(Override(_id(target), pattern=pattern) for pattern, target in raw["overrides"])
    return Layout(model.n_layers, tuple(runs), output, overrides=overrides)


def _id(number: int | str) -> str:
    return CPU_ID if number == "CPU" else f"D{number}"


def _rig(stand_ins: str) -> Rig:
    is_rpc = stand_ins == "rpc"
    devices = tuple(
        Device(
            id=_id(number),
            name="stand-in",
            backend="RPC" if is_rpc else "CUDA",
            kind="gpu",
            total_bytes=_TIB,
            endpoint=f"127.0.0.1:{50152 + number}" if is_rpc else None,
        )
        for number in range(3)
    )
    return Rig(devices, make_host("host", _TIB))
