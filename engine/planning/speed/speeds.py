"""Speeds of devices and links: measured, learnt from answers, published for the card, or typical for its kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Literal, get_args

from msgspec import Struct, field

from engine.base.values import replace
from engine.devices.card_catalogue import BANDWIDTHS
from engine.devices.device import CPU_ID, Device, DeviceKind, Rig, is_on_this_machine
from engine.planning.layout.layout import Layout


class Link(Struct, frozen=True):
    """Link to a device: latency of one transfer in seconds, and throughput in bytes per second."""

    latency_s: float
    bytes_per_second: float


class Speeds(Struct, frozen=True):
    """Measured and learnt speeds of devices. For a device that is missing, the usual values of this module are used.

    All mappings except the ratios have device ids as keys.

    `bandwidths`: bytes per second at which F16 weights are read.
    `by_type`: bytes per second at which weights of other tensor types are read, by type name.
    `op_seconds`: seconds of a small computation that reads no weights.
    `links`: latency and throughput of transfers.
    `products`: speed of matrix multiplications in large batches, in multiply-adds per second, by type name or kernel.
    `factors`: learnt ratio of real to predicted time; the key `LINKS` is for transfers.
    `ratios`: ratio of real to predicted time that remains after `factors` are applied, by class of layout, such as
    several GPUs with overrides (`layout_class`).
    `prompt_factors`, `prompt_ratios`: the same as `factors` and `ratios`, for prompts instead of answers.
    """

    bandwidths: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)
    by_type: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    op_seconds: Mapping[str, float] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    products: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    prompt_factors: Mapping[str, float] = field(default_factory=dict)
    prompt_ratios: Mapping[str, float] = field(default_factory=dict)

    @property
    def unlearnt(self) -> Speeds:
        """Return the measured speeds only; factors and ratios that were learnt from answers are left out."""
        return replace(self, ratios={}, factors={}, prompt_ratios={}, prompt_factors={})


NO_MEASUREMENTS = Speeds()
LINKS = "links"
"""Key of the factor for transfers in `Speeds.factors`; no device has this id."""


def layout_class(layout: Layout, rig: Rig) -> str:
    """Return the class of a layout: a text that is the key of the learnt corrections.

    Predictions for layouts of one class are assumed to be wrong by the same ratio. A class is the split mode, the kinds
    of devices that read weights, whether there are several devices, and whether there are overrides.
    """
    used = {*layout.devices, *(override.device for override in layout.overrides)}
    kinds = set()
    for device in rig.all_devices:
        if device.id in used:
            kinds.add("cpu" if device.id == CPU_ID else "remote" if device.is_rpc else device.kind)
    several = " several" if len(used - {CPU_ID}) > 1 else ""
    moved = " overrides" if layout.overrides else ""
    return f"{layout.split_mode} {'+'.join(sorted(kinds))}{several}{moved}"


Source = Literal["measured", "answers", "card", "guess"]
"""Source of a speed, most reliable first: measured, learnt from answers, published for the card, a guess."""
SOURCES: tuple[Source, ...] = get_args(Source)

_GB = 1_000_000_000

_BY_KIND = {"gpu": 300, "igpu": 60, "accel": 40, "cpu": 40}
"""Usual memory bandwidth in GB/s by kind of device: a guess, shown as "roughly"."""
_PRODUCTS_PER_BYTE = {"gpu": 30, "igpu": 10, "accel": 5, "cpu": 3}
"""Usual number of multiply-adds of a matrix multiplication in the time in which one byte is read, by kind of device.

It is a guess, shown as "roughly".
"""
# Usual links: guesses, until a link is measured.
_LOCAL = Link(20e-6, 10 * _GB)
"""Usual link of a local device, if it was not measured."""
_LOOPBACK_LINK = Link(100e-6, 2 * _GB)
"""Usual link of an RPC worker on this computer, if it was not measured."""
_NETWORK = Link(500e-6, 110_000_000)
"""Usual link of an RPC worker on another computer, if it was not measured: gigabit Ethernet."""
_HOP_SECONDS = 20e-6
"""Fixed seconds of a transfer to a local device, in addition to the time on its link; a guess."""
_REMOTE_HOP_SECONDS = 90e-6
"""Fixed seconds of a transfer to an RPC worker, in addition to the time on its link.

This is processor time of client and worker. Like all constants of this module that are called fitted, the value was
fitted to measured speeds of 55 layouts of nine models (`benchmarks/speed_prediction.py`).
"""
_DESCRIBED_SECONDS, DESCRIBED_BYTES = 3.3e-6, 900
"""Cost of sending one node of a ggml graph to an RPC worker: seconds of processor time, and bytes.

The bytes are the size of two to three tensors in the message. The seconds are fitted. They include writing and reading
these tensors, creating them in the worker, and views, which `Work.ops` does not count.
"""
_OP_SECONDS = 4e-6
"""Seconds of a computation that reads next to nothing: the start of a kernel, or a barrier of the CPU's threads.

It is a guess that is used until the device was measured.
"""
_EFFICIENCY: Mapping[Source, tuple[float, float]] = {
    "measured": (0.8, 1.0),
    "answers": (0.8, 1.0),
    "card": (0.45, 0.9),
    "guess": (0.45, 0.9),
}
"""(Smallest, largest) share of a device's bandwidth that a model reaches, by source of the bandwidth.

A measurement runs one matrix multiplication after another, so even a measured bandwidth may not be reached.
"""
_CPU_EFFICIENCY = (0.7, 0.95)
"""(Smallest, largest) share of a CPU's measured bandwidth that a model reaches.

The mean of the inverses of both shares is 1.24, the fitted slowdown.
"""
_CPU_PRODUCTS_SHARE = 0.91
"""Share of a CPU's measured speed of matrix multiplications that a prompt reaches; fitted.

It is below 1 because the matrices of a model are not in the CPU's caches.
"""
_CPU_OP_WEIGHT = 3.5
"""Mean time of a graph node on a CPU, as a multiple of the measured time of an addition. The number is fitted.

An addition is among the cheapest nodes: norms, RoPE and softmax take longer, and a matrix multiplication first converts
the activations to the type of its kernel. On cards, the launch of a kernel takes most of the time, whatever the kernel
computes.
"""

_FAMILIES: Mapping[str, str] = {
    "F32": "F16", "BF16": "F16", "Q5_0": "Q4_0", "Q5_1": "Q4_1", "Q8_1": "Q8_0", "MXFP4": "Q4_0", "NVFP4": "Q4_0",
    "Q2_K": "Q4_K", "Q3_K": "Q4_K", "Q8_K": "Q6_K", "IQ4_NL": "IQ4_XS", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0",
    "IQ1_S": "IQ4_XS", "IQ1_M": "IQ4_XS", "IQ2_XXS": "IQ4_XS", "IQ2_XS": "IQ4_XS", "IQ2_S": "IQ4_XS",
    "IQ3_XXS": "IQ4_XS", "IQ3_S": "IQ4_XS",
}  # fmt: skip
"""Tensor types that are not measured, each with the measured type that has the most similar kernel."""


@cache
def _known_name(device_name: str) -> str | None:
    """Return the longest key of `BANDWIDTHS` that `device_name` contains as whole words.

    None if there is none.
    """
    return next(
        (
            name
            # The longest name first, because "RTX 3060 Ti" contains "RTX 3060" too.
            for name in sorted(BANDWIDTHS, key=len, reverse=True)
            if re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", device_name, re.IGNORECASE)
        ),
        None,
    )


def bandwidth(device: Device, speeds: Speeds = NO_MEASUREMENTS) -> float:
    """Return the bytes per second at which `device` reads memory.

    It is the measured value, or else the one published for this card, or else a typical one for this kind of device.
    """
    measured = speeds.bandwidths.get(device.id)
    if measured is not None:
        return measured
    name = None if device.is_host else _known_name(device.name)
    if name is not None:
        return BANDWIDTHS[name] * float(_GB)
    return _BY_KIND[_computing_kind(device)] * float(_GB)


def _computing_kind(device: Device) -> DeviceKind:
    """Return the kind of the device that computes; for an RPC worker, the kind of device that it serves.

    If a worker's backend is unknown, the result is "cpu", the slowest kind.
    """
    if not device.is_rpc:
        return device.kind
    return "cpu" if device.remote is None or device.remote.backend in ("", "CPU") else "gpu"


EXPERTS, REPACKED = ".experts", ".repacked"
"""Suffixes in names of kernels, after the tensor type, as in "Q4_0.repacked".

They mean matrix multiplications with experts, and with weights that the CPU has repacked. A kernel that was not
measured has the speed of the kernel without the suffix.
"""
_HEAD_WIDTHS = (64, 128, 256)
"""Head sizes, in elements, for which attention kernels are measured."""
_MOST_LOG2_HEADS = 3.0
"""log2 of 8, the largest number of KV heads with which attention is measured.

Attention is also measured with one KV head (kernels with suffix ".alone"). For other numbers of heads the time is
interpolated.
"""


def repacked(kernel: str) -> str:
    """Return the name of the kernel that is used instead of `kernel` if the CPU has repacked the weights."""
    type_name, dot, rest = kernel.partition(".")
    return f"{type_name}{REPACKED}{dot}{rest}"


def _of_kernel(speeds: Mapping[str, float] | None, kernel: str) -> float | None:
    """Return the speed of `kernel`, or of the most similar one that was measured; None if there is none."""
    if speeds is None:
        return None
    type_name, dot, rest = kernel.partition(".")
    family = _FAMILIES.get(type_name, "")
    suffixes = (f"{dot}{rest}", f"{dot}{rest}".replace(REPACKED, ""), f"{dot}{rest}".replace(EXPERTS, ""), "")
    names = (f"{name}{suffix}" for suffix in suffixes for name in (type_name, family))
    return next((speeds[name] for name in names if name in speeds), None)


def bandwidth_of_type(device: Device, kernel: str, speeds: Speeds) -> float:
    """Return the bytes per second at which a kernel of matrix multiplication reads weights.

    If neither this kernel nor a similar one was measured, the result is the bandwidth for F16.

    `kernel`: type of the weights, perhaps with a suffix (`EXPERTS`, `REPACKED`).
    """
    found = _of_kernel(speeds.by_type.get(device.id), kernel)
    return bandwidth(device, speeds) if found is None else found


def products(device: Device, kernel: str, speeds: Speeds) -> float:
    """Return the speed of matrix multiplications on `device` in large batches, in multiply-adds per second.

    `kernel`: type of the weights, perhaps with a suffix (`EXPERTS`, `REPACKED`).
    """
    by_type = speeds.products.get(device.id)
    found = _of_kernel(by_type, kernel)
    # The measured speed of the device with F16 is a better guess than the usual speed of such devices.
    if found is None and by_type is not None:
        found = by_type.get("F16")
    if found is not None:
        return found * _reached(device)
    return _PRODUCTS_PER_BYTE[_computing_kind(device)] * bandwidth(device, speeds)


def _reached(device: Device) -> float:
    """Return the ratio (0 to 1) of the real speed in prompts to the measured speed of matrix multiplications.

    It is below 1 only for a device that computes with a CPU.
    """
    return _CPU_PRODUCTS_SHARE if _computing_kind(device) == "cpu" else 1.0


def attention_seconds(
    device: Device, products: float, cells: float, cells_log2_heads: float, *, one: bool, speeds: Speeds
) -> float | None:
    """Return the seconds of attention to `cells` cells of the KV cache; None if attention was not measured.

    `products`: number of multiply-adds with keys and values.
    `cells`: number of cells, counted once for each head and token.
    `cells_log2_heads`: `cells` times log2 of the number of KV heads (its mean, if layers differ).
    `one`: whether the batch is a single token, for which other kernels are used.
    """
    known = speeds.products.get(device.id, {})
    # A head multiplies with a key and a value for each cell, so half of the products is the mean head size.
    width = products / cells / 2 if cells else 1.0
    together = _cell_seconds(known, ".1" if one else "", width)
    if not one or together is None:
        return None if together is None else cells * together / _reached(device)
    alone = _cell_seconds(known, ".1.alone", width)
    # Interpolated in log2 of the number of KV heads, between the measurements with one and with several heads.
    share = min(1.0, cells_log2_heads / cells / _MOST_LOG2_HEADS) if cells else 1.0
    return cells * (together if alone is None else alone + (together - alone) * share)


def _cell_seconds(known: Mapping[str, float], suffix: str, width: float) -> float | None:
    """Return the seconds for attention of one head to one cell; None if attention was not measured.

    Between the measured head sizes the time is interpolated.

    `known`: measured speeds by kernel. `suffix`: end of the kernel's name. `width`: head size in elements.
    """
    rates = {each: known.get(f"attention.{each}{suffix}") for each in _HEAD_WIDTHS}
    # Each width multiplies a key and a value.
    times = [(float(each), 2 * each / rate) for each, rate in rates.items() if rate is not None]
    if not times:
        return None
    after = next((index for index, (each, _) in enumerate(times) if each >= width), len(times) - 1)
    # Outside the measured widths the time is assumed to be proportional to the width.
    if after == 0 or times[after][0] < width:
        return times[after][1] * width / times[after][0]
    (low, low_s), (high, high_s) = times[after - 1 : after + 1]
    return low_s + (high_s - low_s) * (width - low) / (high - low)


def recurrent_rate(device: Device, kernel: str, speeds: Speeds) -> float | None:
    """Return the speed of a recurrent kernel, in elements of the state times tokens per second.

    None if it was not measured. RPC workers are not measured; one that computes with a CPU gets the speed of the host.
    """
    measured = speeds.products.get(device.id, {}).get(kernel)
    if measured is None and device.is_rpc and _computing_kind(device) == "cpu":
        return speeds.products.get(CPU_ID, {}).get(kernel)
    return measured


def prompt_source(device: Device, speeds: Speeds) -> Source:
    """Return how the speed of `device` in prompts is known: measured, learnt from answers, or a guess.

    The result is never "card" (published for the card), because published figures do not include prompt speeds.
    """
    if device.id in speeds.products:
        return "measured"
    return "answers" if device.id in speeds.prompt_factors else "guess"


def op_seconds(device: Device, speeds: Speeds = NO_MEASUREMENTS) -> float:
    """Return the seconds of a small computation on `device`, such as a norm, which reads next to nothing."""
    measured_s = speeds.op_seconds.get(device.id)
    if measured_s is None:
        return _OP_SECONDS
    return measured_s * (_CPU_OP_WEIGHT if _computing_kind(device) == "cpu" else 1.0)


def source(device: Device, speeds: Speeds) -> Source:
    """Return how the speed of `device` in answers is known: measured, learnt, published for the card, or a guess."""
    if device.id in speeds.bandwidths:
        return "measured"
    if device.id in speeds.factors:
        return "answers"
    return "card" if not device.is_host and _known_name(device.name) is not None else "guess"


def efficiency(device: Device, speeds: Speeds) -> tuple[float, float]:
    """Return the (smallest, largest) share of its bandwidth that `device` reaches while it computes a model."""
    # Answers teach a factor on the nominal speed, so the shares of a guess apply.
    where = source(device, speeds)
    if where == "measured" and _computing_kind(device) == "cpu":
        return _CPU_EFFICIENCY
    return _EFFICIENCY["guess" if where == "answers" else where]


def hop_seconds(device: Device) -> float:
    """Return the seconds that each transfer to `device` takes for copying inputs and starting the graph.

    The time on the device's link is not included.
    """
    return _REMOTE_HOP_SECONDS if device.is_rpc else _HOP_SECONDS


def sent_graph_seconds(device: Device, speeds: Speeds) -> float:
    """Return the seconds for sending one node of a ggml graph to `device`; 0 for a device that is no RPC worker."""
    if not device.is_rpc:
        return 0.0
    return _DESCRIBED_SECONDS + DESCRIBED_BYTES / link(device, speeds).bytes_per_second


def link(device: Device, speeds: Speeds = NO_MEASUREMENTS) -> Link:
    """Return latency and throughput of transfers to `device`: measured, else typical for this kind of link."""
    measured = speeds.links.get(device.id)
    if measured is not None:
        return measured
    # No measurement: assume a local bus, a loopback connection or gigabit Ethernet.
    if device.endpoint is None:
        return _LOCAL
    return _LOOPBACK_LINK if is_on_this_machine(device) else _NETWORK


class Sending(Struct, frozen=True):
    """Transfer of weights to an RPC worker during a load.

    `seconds` is an upper bound, because a worker may still have weights of an earlier load in its cache.
    """

    id: str
    size_bytes: int
    seconds: float


def sendings(weights_bytes: Mapping[str, int], rig: Rig, speeds: Speeds) -> tuple[Sending, ...]:
    """Return the transfer of weights to each RPC worker whose link was measured.

    `weights_bytes`: bytes of weights by device id.
    """
    found = []
    for device in rig.devices:
        size_bytes, link = weights_bytes.get(device.id, 0), speeds.links.get(device.id)
        if device.is_rpc and size_bytes and link is not None:
            found.append(Sending(device.id, size_bytes, size_bytes / link.bytes_per_second))
    return tuple(found)


class HopCosts(Struct, frozen=True):
    """Cost of passing a token's hidden state between devices.

    `size_bytes`: bytes of the hidden state.
    `seconds`: for each device, its id and the seconds of one transfer between it and the host.
    """

    size_bytes: int
    seconds: tuple[tuple[str, float], ...]

    def between(self, one: str, other: str) -> float:
        """Return the seconds for passing a token's hidden state from device `one` to device `other`.

        The state is assumed to go through the host's memory, so the times of both devices are added. The CPU adds
        nothing.
        """
        times = dict(self.seconds)
        return sum(times.get(each, 0.0) for each in (one, other) if each != CPU_ID)


def hop_costs(size_bytes: float, rig: Rig, speeds: Speeds) -> HopCosts:
    """Return the cost of passing a hidden state of `size_bytes` bytes between any two devices of `rig`.

    The time of a transfer is a fixed time of the device, plus the latency of its link, plus the bytes divided by the
    link's throughput.
    """
    times = []
    for device in rig.devices:
        away = link(device, speeds)
        times.append((device.id, hop_seconds(device) + away.latency_s + size_bytes / away.bytes_per_second))
    return HopCosts(int(size_bytes), tuple(times))
