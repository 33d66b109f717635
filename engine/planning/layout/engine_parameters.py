"""What llama.cpp is told about a layout. Pure: the child turns ids into ggml devices."""

from __future__ import annotations

import msgspec

from engine.base.errors import LayoutError
from engine.devices.device import CPU_ID
from engine.planning.layout.layout import Layout, Run, merge_runs
from engine.planning.layout.patterns import part_pattern

MAX_DEVICES = 16
"""Length of the `tensor_split` array that llama.cpp copies (`llama_max_devices`)."""
MAX_ENTRIES = 15
"""Most entries of a device list: GGML_SCHED_MAX_BACKENDS less the final CPU backend."""
MATCHES_NO_TENSOR = "^no tensor$"
"""A name with a space, which no tensor of llama.cpp has."""


class TensorOverride(msgspec.Struct, frozen=True):
    """Weights whose name the ECMAScript regex `pattern` finds go to `device`."""

    pattern: str
    device: str


class EngineParameters(msgspec.Struct, frozen=True, kw_only=True):
    """`devices` are our ids in the order of the entries.

    `tensor_split` always has `MAX_DEVICES` numbers: layer counts in mode layer, shares of every layer in the modes
    tensor and row. `extra_buffers`: the CPU may keep weights in an order of its own, which is faster.
    """

    n_gpu_layers: int
    devices: tuple[str, ...]
    tensor_split: tuple[float, ...]
    split_mode: str
    main_gpu: int = 0
    overrides: tuple[TensorOverride, ...] = ()
    extra_buffers: bool = True


def entries(layout: Layout) -> tuple[Run, ...]:
    """Return the runs handed to the engine as device entries; position `n_layers` is the output layer.

    A leading CPU run is none of them (it is what `n_gpu_layers` leaves out); an output layer on another device than
    the last layer's is one of its own.
    """
    output = Run(layout.output_device, layout.n_layers, layout.n_layers)
    positions = merge_runs((*layout.runs, output))
    return positions[1:] if positions[0].device == CPU_ID else positions


def further_devices(layout: Layout) -> tuple[str, ...]:
    """Return the devices that only overrides name: entries without layers, as the engine computes on entries only."""
    known = {CPU_ID, *(run.device for run in entries(layout))}
    return tuple(dict.fromkeys(each.device for each in layout.overrides if each.device not in known))


def entry_count(layout: Layout) -> int:
    """Return how many device entries the engine would get; `MAX_ENTRIES` is the most it takes."""
    return len(entries(layout)) + len(further_devices(layout))


def split_members(layout: Layout) -> tuple[str, ...]:
    """Return the devices that share every layer in modes tensor and row: those with a share above 0, in their order."""
    return tuple(device for device, share in layout.tensor_split if share > 0)


def used_devices(layout: Layout) -> frozenset[str]:
    """Return every device that a load of `layout` opens: of its runs, its output, its shares and its overrides."""
    return frozenset((*layout.devices, *split_members(layout), *(each.device for each in layout.overrides)))


def leading_cpu_layers(layout: Layout) -> int:
    """Return how many layers the CPU run at the front has, which `n_gpu_layers` leaves out."""
    return layout.runs[0].length if layout.runs[0].device == CPU_ID else 0


def engine_parameters(layout: Layout, model_n_layers: int, n_unlisted: int = 0) -> EngineParameters:
    """Return what llama.cpp is told so that every layer, its KV cache and the output layer land where `layout` says.

    `n_unlisted` layers that the engine makes behind those of the file go with the last, for which the CPU becomes an
    entry if it has all layers and the output is elsewhere.
    Whole layer counts that sum to `n_gpu_layers` make llama.cpp's float32 split exact; shares of 1 would not.

    Raises:
        LayoutError: for what the rules refuse before: another layer count, too many entries or members.
    """
    if layout.n_layers != model_n_layers:
        raise LayoutError(
            f"the layout is for {layout.n_layers} layers, the model has {model_n_layers}", place="model.layers"
        )
    if layout.split_mode in ("tensor", "row"):
        return _split_parameters(layout)
    if entry_count(layout) > MAX_ENTRIES:
        raise LayoutError(
            f"the layout needs {entry_count(layout)} device entries and the engine takes {MAX_ENTRIES}", place="runs"
        )
    offloaded = entries(layout)
    devices = (*(run.device for run in offloaded), *further_devices(layout))
    counts = [float(run.length) for run in offloaded]
    with_last = next((place for place, run in enumerate(offloaded) if run.first <= layout.n_layers - 1 <= run.last), -1)
    if n_unlisted and offloaded and with_last < 0:
        devices, counts, with_last = (CPU_ID, *devices), [0.0, *counts], 0
    if offloaded:
        counts[with_last] += n_unlisted
    return EngineParameters(
        n_gpu_layers=round(sum(counts)),
        devices=devices,
        tensor_split=tuple(counts + [0.0] * (MAX_DEVICES - len(counts))),
        # Mode none keeps the first entry only, and with no entry it is an error.
        split_mode=layout.split_mode if len(devices) == 1 else "layer",
        overrides=tensor_overrides(layout),
    )


def _split_parameters(layout: Layout) -> EngineParameters:
    """Return the parameters of modes tensor and row: shares as they are, and which layers take part."""
    members = split_members(layout)
    if len(members) > MAX_DEVICES:
        raise LayoutError(
            f"{len(members)} devices have a share and the engine takes {MAX_DEVICES}", place="tensor_split"
        )
    shares = [share for _, share in layout.tensor_split if share > 0]
    return EngineParameters(
        n_gpu_layers=layout.n_layers + 1 - leading_cpu_layers(layout),
        devices=members,
        tensor_split=tuple(shares + [0.0] * (MAX_DEVICES - len(shares))),
        split_mode=layout.split_mode,
        main_gpu=members.index(layout.main_device) if layout.main_device in members else 0,
        overrides=tensor_overrides(layout),
    )


def tensor_overrides(layout: Layout) -> tuple[TensorOverride, ...]:
    """Return the overrides as patterns on tensor names, for `pattern_finder`; the first that finds a name decides."""
    return tuple(
        TensorOverride(override.pattern or part_pattern(override.part or "all", override.layers), override.device)
        for override in layout.overrides
    )
