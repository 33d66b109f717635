"""How fast a prompt is read on a layout.

A prompt goes through the devices in micro batches. Each weight is read once for a whole micro batch and multiplied with
every token of it, so that the arithmetic decides and not the bandwidth: what takes longer of the two counts. Beside it
stand attention to the tokens before, the small computations, which read and write all tokens, and the hops, which carry
all of them. Weights in host memory that a card computes with (op_offload) cross its link for every micro batch.
Devices work one after another; that a pipeline has them work at the same time is left to what answers teach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from engine.devices.device import CPU_ID, Device, Rig
from engine.layout.layout import Layout
from engine.memory.backends import backend_traits
from engine.settings.context_settings import ContextSettings
from engine.speed.known_cards import (
    Source,
    bandwidth,
    bandwidth_of_type,
    hop_seconds,
    link,
    op_seconds,
    products,
    prompt_source,
)
from engine.speed.route import DeviceTime, Timed, hops, least_sure, moves, shares, whole_s
from engine.speed.speeds import LINKS, Speeds, layout_class
from engine.speed.work import Work

_ACTIVATION_BYTES = 4


@dataclass(frozen=True, slots=True)
class PromptForecast(Timed):
    """Seconds of each token of a prompt with `n_tokens`, its devices, and the least sure of their sources."""

    token_s: float
    n_tokens: int
    devices: tuple[DeviceTime, ...]
    source: Source
    is_learnt: bool = False


@dataclass(slots=True)
class _Cost:
    """What a micro batch takes on a device, in seconds, and what all of the prompt takes there once."""

    device: Device
    work_s: float = 0.0
    link_s: float = 0.0
    once_s: float = 0.0


def forecast_prompt(
    layout: Layout,
    work: Work,
    kv_bytes: Sequence[int],
    context: ContextSettings,
    rig: Rig,
    speeds: Speeds,
    n_tokens: int,
) -> PromptForecast:
    """Return how long each of `n_tokens` takes, read into an empty context. `kv_bytes`: of each layer's full cache."""
    n_batches = ceil(n_tokens / max(1, context.n_ubatch))
    rows = n_tokens / n_batches
    costs = _costs(layout, work, kv_bytes, context, rig, speeds, rows, n_tokens)
    ratio = speeds.prompt_ratios.get(layout_class(layout, rig), 1.0) / n_tokens
    links = speeds.prompt_factors.get(LINKS, 1.0)
    seconds, away = {}, {}
    for key, cost in costs.items():
        factor = speeds.prompt_factors.get(key, 1.0)
        away[key] = n_batches * cost.link_s * links * ratio
        seconds[key] = (n_batches * cost.work_s + cost.once_s) * factor * ratio + away[key]
    token_s = whole_s(layout, seconds)
    times = tuple(
        DeviceTime(device.id, seconds[device.id], away[device.id], prompt_source(device, speeds))
        for device in rig.all_devices
        if device.id in seconds
    )
    is_learnt = layout_class(layout, rig) in speeds.prompt_ratios
    return PromptForecast(token_s, n_tokens, times, least_sure(times, token_s), is_learnt)


def _costs(
    layout: Layout,
    work: Work,
    kv_bytes: Sequence[int],
    context: ContextSettings,
    rig: Rig,
    speeds: Speeds,
    rows: float,
    n_tokens: int,
) -> dict[str, _Cost]:
    """Return what a micro batch of `rows` tokens costs on each device. Devices that the rig lacks have none."""
    devices = {device.id: device for device in rig.all_devices}
    costs: dict[str, _Cost] = {}
    borrower = _borrower(layout, context, rig, rows)

    def cost(device_id: str) -> _Cost | None:
        if device_id not in costs and device_id in devices:
            costs[device_id] = _Cost(devices[device_id])
        return costs.get(device_id)

    def multiply(device_id: str, type_name: str, read_bytes: float, whole_bytes: float) -> None:
        """Count a product: `read_bytes` are what one token reads, `whole_bytes` what all tokens read together."""
        lender = borrower if device_id == CPU_ID else None
        found = cost(device_id if lender is None else lender.id)
        if found is None:
            return
        read_s = whole_bytes / bandwidth_of_type(found.device, type_name, speeds)
        count = read_bytes * work.weights_in_byte.get(type_name, 0.0) * rows
        computed_s = count / products(found.device, type_name, speeds)
        found.work_s += max(read_s, computed_s) if whole_bytes >= 0 else min(read_s, computed_s)
        if lender is not None:
            found.link_s += whole_bytes / link(found.device, speeds).bytes_per_second

    members = shares(layout)
    column_bytes = work.hop_bytes * rows
    for run in layout.runs:
        for device_id, part in members if members and run.device != CPU_ID else ((run.device, 1.0),):
            for name, size in work.weights(run.first, run.last):
                multiply(device_id, name, part * size, part * work.whole_bytes(name, run.first, run.last))
            if (found := cost(device_id)) is not None:
                each_s = op_seconds(found.device, speeds) + column_bytes / bandwidth(found.device, speeds)
                found.work_s += work.ops(run.first, run.last) * each_s
            keeper = cost(device_id if context.offload_kqv else CPU_ID)
            if keeper is not None and work.caches(kv_bytes, run.first, run.last):
                # Each token is set against half of the others, once for keys and once for values.
                width = work.hop_bytes / _ACTIVATION_BYTES
                count = part * run.length * width * rows * n_tokens
                keeper.work_s += count / products(keeper.device, "F16", speeds)
    for run, moved in moves(layout, work):
        for name, size in moved.between(run.first, run.last):
            whole_bytes = moved.whole_bytes(name, run.first, run.last)
            multiply(run.device, name, -size, -whole_bytes)
            multiply(moved.device, name, size, whole_bytes)
    output = cost(layout.output_device)
    if output is not None:
        # Of a prompt the last token alone is answered.
        output.once_s += sum(
            size / bandwidth_of_type(output.device, name, speeds) for name, size in work.output.items()
        )
    for device_id, size_bytes, times in hops(layout, work):
        if (found := cost(device_id)) is not None:
            away = link(found.device, speeds)
            each_s = hop_seconds(found.device) + away.latency_s + rows * size_bytes / away.bytes_per_second
            found.link_s += times * each_s
    return costs


def _borrower(layout: Layout, context: ContextSettings, rig: Rig, rows: float) -> Device | None:
    """Return the device that computes with the CPU's weights; None where that does it itself."""
    if not context.op_offload or rows < context.offload_batch:
        return None
    return next((each for each in rig.devices if each.id in layout.devices and backend_traits(each).op_offload), None)
