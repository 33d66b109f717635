"""Load jobs of a small made-up model, for tests in which no engine looks at the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.gguf.model_file import Block, ModelFile
from engine.layout.context_settings import ContextSettings
from engine.layout.layout import Layout, Run
from engine.runner.job import LoadJob
from engine.units import GIB, MIB

N_LAYERS = 4


def made_up_model(path: Path = Path("made-up.gguf")) -> ModelFile:
    """Return a model of four empty layers."""
    blocks = tuple(Block(index, (), 0, 0, 0, 0) for index in range(N_LAYERS))
    return ModelFile((path,), 3, "llama", "made-up", {}, (), blocks, (), 259, 0)


def worker_device(device_id: str, endpoint: str, total_bytes: int = 256 * MIB) -> Device:
    """Return an RPC device with all its memory free."""
    return Device(
        id=device_id,
        name=device_id,
        backend="RPC",
        kind="gpu",
        total_bytes=total_bytes,
        free_bytes=total_bytes,
        endpoint=endpoint,
    )


def make_job(devices: Sequence[Device] = (), layout: Layout | None = None) -> LoadJob:
    """Return a job that spreads the layers over `devices` in order, or puts them on the CPU."""
    rig = Rig(tuple(devices), make_host("host", 8 * GIB, 8 * GIB))
    if layout is None:
        places = [device.id for device in devices] or [CPU_ID]
        runs = [Run(place, index, index) for index, place in enumerate(places)]
        runs[-1] = replace(runs[-1], last=N_LAYERS - 1)
        layout = Layout(N_LAYERS, tuple(runs), places[-1])
    return LoadJob(model=made_up_model(), rig=rig, layout=layout, context=ContextSettings(n_ctx=512))
