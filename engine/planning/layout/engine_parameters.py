"""Translation of a layout into fields of llama.cpp's `llama_model_params`, with device ids instead of ggml devices.

The child process that loads the model replaces each id by its `ggml_backend_dev_t`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from msgspec import Struct

from engine.base.errors import LayoutError
from engine.devices.device import CPU_ID
from engine.planning.layout.layout import Layout, Run, SplitMode, merge_runs
from engine.planning.layout.patterns import part_pattern

MAX_DEVICES = 16
"""Length of the `tensor_split` array of llama.cpp (`llama_max_devices`): largest number of devices with a share."""
MAX_ENTRIES = 15
"""Largest number of entries of llama.cpp's device list.

It is `GGML_SCHED_MAX_BACKENDS` less the CPU backend, which llama.cpp adds last.
"""
ENGINE_SPLIT_MODES: Mapping[SplitMode, int] = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
"""Values of `llama_split_mode` in llama.h, for `llama_model_params.split_mode`."""
MATCHES_NO_TENSOR = "^no tensor$"
"""Regex that matches no tensor, because llama.cpp's tensor names have no spaces."""


class TensorOverride(Struct, frozen=True):
    """One entry of `tensor_buft_overrides`: weights with a name that matches the regex `pattern` go to `device`."""

    pattern: str
    device: str


class EngineParameters(Struct, frozen=True, kw_only=True):
    """The fields of `llama_model_params` that follow from a layout.

    `devices`: device ids in the order of llama.cpp's device list.
    `tensor_split`: `MAX_DEVICES` numbers, padded with 0. Each belongs to the device at the same
    index in `devices`: in mode layer its number of layers, in modes tensor and row its share of each layer.
    `main_gpu`: index in `devices`.
    `extra_buffers`: whether the CPU may repack weights into a faster order (`use_extra_bufts`).
    """

    n_gpu_layers: int
    devices: tuple[str, ...]
    tensor_split: tuple[float, ...]
    split_mode: SplitMode
    main_gpu: int = 0
    overrides: tuple[TensorOverride, ...] = ()
    extra_buffers: bool = True


def float32(value: float) -> float:
    """Return `value` rounded as C does when it stores a `float`."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def entries(layout: Layout) -> tuple[Run, ...]:
    """Return the runs (neighbouring layers on one device) that become entries of llama.cpp's device list.

    The layer with the index `n_layers` is the output layer.
    A CPU run at the front is not an entry, because `n_gpu_layers` leaves its layers out. The output layer is an entry
    of its own if it is on another device than the last layer.
    """
    output = Run(layout.output_device, layout.n_layers, layout.n_layers)
    positions = merge_runs((*layout.runs, output))
    return positions[1:] if positions[0].device == CPU_ID else positions


def further_devices(layout: Layout) -> tuple[str, ...]:
    """Return the ids of the devices that have overrides, but no layers.

    llama.cpp's device list must contain these devices too; their number of layers is 0.
    """
    # The CPU is always there: llama.cpp adds its backend after the devices of the list.
    known = {CPU_ID, *(run.device for run in entries(layout))}
    return tuple(dict.fromkeys(each.device for each in layout.overrides if each.device not in known))


def entry_count(layout: Layout) -> int:
    """Return the number of entries in the device list of `layout`; llama.cpp takes at most `MAX_ENTRIES`."""
    return len(entries(layout)) + len(further_devices(layout))


def split_members(layout: Layout) -> tuple[str, ...]:
    """Return the ids of the devices with a share above 0, in order.

    In modes tensor and row each of them has a part of every split layer.
    """
    return tuple(device for device, share in layout.tensor_split if share > 0)


def used_devices(layout: Layout) -> frozenset[str]:
    """Return the ids of all devices that a load of `layout` opens.

    These are the devices that have layers, the output layer, a share above 0, or an override.
    """
    return frozenset((*layout.devices, *split_members(layout), *(each.device for each in layout.overrides)))


def leading_cpu_layers(layout: Layout) -> int:
    """Return the number of layers on the CPU before the first layer on another device.

    llama.cpp's `n_gpu_layers` does not count them.
    """
    return layout.runs[0].length if layout.runs[0].device == CPU_ID else 0


def engine_parameters(layout: Layout, model_n_layers: int, n_unlisted: int = 0) -> EngineParameters:
    """Return the parameters that make llama.cpp place layers, KV cache and output layer as in `layout`.

    `model_n_layers`: number of layers in the model file, which the layout must match.
    `n_unlisted`: number of layers that llama.cpp adds after those of the file (`count_unlisted_layers`); they go to the
    device of the last layer.

    Raises:
        LayoutError: the layout is for another number of layers, or needs a longer device list, or more devices with a
        share, than llama.cpp takes.
    """
    if layout.n_layers != model_n_layers:
        raise LayoutError(
            f"the layout is for {layout.n_layers} layers, the model has {model_n_layers}", location="model.layers"
        )
    if layout.split_mode in ("tensor", "row"):
        return _split_parameters(layout)
    if entry_count(layout) > MAX_ENTRIES:
        raise LayoutError(
            f"the layout needs {entry_count(layout)} device entries, but the engine takes at most {MAX_ENTRIES}",
            location="runs",
        )
    # llama.cpp sums and divides `tensor_split` in float32 and compares a layer's index with the result. Whole layer
    # counts that sum to `n_gpu_layers` keep this exact; shares that sum to 1 would not.
    offloaded = entries(layout)
    devices = (*(run.device for run in offloaded), *further_devices(layout))
    counts = [float(run.length) for run in offloaded]
    with_last = next((index for index, run in enumerate(offloaded) if run.first <= layout.n_layers - 1 <= run.last), -1)
    # If all layers of the file are on the CPU and only the output layer is offloaded, the added layers count as
    # offloaded too. The CPU then has to be an entry to get them.
    if n_unlisted and offloaded and with_last < 0:
        devices, counts, with_last = (CPU_ID, *devices), [0.0, *counts], 0
    if offloaded:
        counts[with_last] += n_unlisted
    return EngineParameters(
        n_gpu_layers=round(sum(counts)),
        devices=devices,
        tensor_split=tuple(counts + [0.0] * (MAX_DEVICES - len(counts))),
        # With mode none llama.cpp uses `main_gpu` only, and refuses an empty device list. Mode layer does the same for
        # one entry, and takes none.
        split_mode=layout.split_mode if len(devices) == 1 else "layer",
        overrides=tensor_overrides(layout),
    )


def _split_parameters(layout: Layout) -> EngineParameters:
    """Return the parameters of modes tensor and row: shares of the devices, and the number of layers that are split.

    Raises:
        LayoutError: more than `MAX_DEVICES` devices have a share.
    """
    members = split_members(layout)
    if len(members) > MAX_DEVICES:
        raise LayoutError(
            f"{len(members)} devices have a share, but the engine takes at most {MAX_DEVICES}", location="tensor_split"
        )
    shares = [share for _, share in layout.tensor_split if share > 0]
    return EngineParameters(
        n_gpu_layers=layout.n_layers + 1 - leading_cpu_layers(layout),
        devices=members,
        tensor_split=tuple(shares + [0.0] * (MAX_DEVICES - len(shares))),
        split_mode=layout.split_mode,
        # llama.cpp takes an index into the device list, not an id.
        main_gpu=members.index(layout.main_device) if layout.main_device in members else 0,
        overrides=tensor_overrides(layout),
    )


def tensor_overrides(layout: Layout) -> tuple[TensorOverride, ...]:
    """Return the layout's overrides as pairs of regex and device; the first regex that matches a tensor name decides.

    Only this program matches these regexes (`pattern_finder`). llama.cpp gets lists of tensor names
    (`found_overrides`).
    """
    return tuple(
        TensorOverride(override.pattern or part_pattern(override.part or "all", override.layers), override.device)
        for override in layout.overrides
    )
