"""Builders for plans and load specs, and a made-up model for tests in which the engine does not read the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Holding, Rig, make_host
from engine.model.gguf.model_file import Block, FileIdentity, ModelFile
from engine.planning.layout.layout import Layout, Run
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.side_files import NO_SIDE_FILES, SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.session.load_spec import LoadSpec, RetryPolicy

N_LAYERS = 4
ONE_LAYOUT = RetryPolicy()


def made_up_model(path: Path = Path("made-up.gguf")) -> ModelFile:
    """Return a model of four empty layers."""
    blocks = tuple(Block(index, (), 0, 0, 0, 0) for index in range(N_LAYERS))
    return ModelFile((path,), 3, "llama", "made-up", {}, (), blocks, (), 259, 0)


def holding(model: str, size_bytes: int) -> Holding:
    """Return the memory that a loaded model holds on a device. Models with different names are different files."""
    return Holding(model, size_bytes, file_key(model))


def file_key(name: str) -> FileIdentity:
    """Return the identity of a model file with this name."""
    return FileIdentity(((1, hash(name), 0, 0),))


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


def plan_of(
    model: ModelFile | ModelMemory,
    rig: Rig,
    layout: Layout,
    context: ContextSettings,
    side_files: SideFiles = NO_SIDE_FILES,
) -> Plan:
    """Return the plan of these parts."""
    memory = model if isinstance(model, ModelMemory) else ModelMemory(model)
    return Plan(memory, rig, Edit(layout, context, side_files))


def spec_of(
    model: ModelFile | ModelMemory,
    rig: Rig,
    layout: Layout,
    context: ContextSettings,
    retry: RetryPolicy = ONE_LAYOUT,
    *,
    side_files: SideFiles = NO_SIDE_FILES,
) -> LoadSpec:
    """Return the load spec of the plan of these parts."""
    return LoadSpec(plan_of(model, rig, layout, context, side_files), retry)


def make_spec(devices: Sequence[Device] = (), layout: Layout | None = None) -> LoadSpec:
    """Return a load spec that spreads the layers over `devices` in order, or puts them on the CPU."""
    rig = Rig(tuple(devices), make_host("host", 8 * GIB, 8 * GIB))
    if layout is None:
        places = [device.id for device in devices] or [CPU_ID]
        runs = [Run(place, index, index) for index, place in enumerate(places)]
        runs[-1] = replace(runs[-1], last=N_LAYERS - 1)
        layout = Layout(N_LAYERS, tuple(runs), places[-1])
    return spec_of(made_up_model(), rig, layout, ContextSettings(n_ctx=512))
