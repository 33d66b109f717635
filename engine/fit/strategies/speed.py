"""How long a token takes on a layout: bytes read from each device's memory, and hops between devices.

Generation reads every active weight and the KV cache once per token, so memory bandwidth decides. Nominal bandwidths
are not reached, hence a range.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from engine.devices.device import CPU_ID, Device, Rig
from engine.fit.strategies.speeds import NO_MEASUREMENTS, Link, Speeds, layout_class
from engine.fit.strategies.workbench import moved_tensors
from engine.gguf.blocks import part_of_tensor
from engine.gguf.model_file import ModelFile
from engine.layout.layout import Layout
from engine.plan.preview import LayerBytes

_GB = 1_000_000_000
_LOOPBACK = re.compile(r"(127\.|localhost|\[::1\])")
_ACTIVATION_BYTES = 4

KNOWN_BANDWIDTHS: Mapping[str, int] = {
    "RTX 5090": 1792, "RTX 5080": 960, "RTX 5070 Ti": 896, "RTX 5070": 672, "RTX 5060 Ti": 448, "RTX 5060": 448,
    "RTX 4090": 1008, "RTX 4080 SUPER": 736, "RTX 4080": 717, "RTX 4070 Ti SUPER": 672, "RTX 4070 Ti": 504,
    "RTX 4070": 504, "RTX 4060 Ti": 288, "RTX 4060": 272,
    "RTX 3090 Ti": 1008, "RTX 3090": 936, "RTX 3080 Ti": 912, "RTX 3080": 760, "RTX 3070 Ti": 608, "RTX 3070": 448,
    "RTX 3060 Ti": 448, "RTX 3060": 360, "RTX 3050": 224,
    "RTX 2080 Ti": 616, "RTX 2080": 448, "RTX 2070": 448, "RTX 2060": 336,
    "GTX 1080 Ti": 484, "GTX 1080": 320, "GTX 1070": 256, "GTX 1060": 192, "GTX 1660": 192,
    "RTX 6000 Ada": 960, "RTX A6000": 768, "RTX A5000": 768, "RTX A4000": 448,
    "H200": 4800, "H100 PCIe": 2000, "H100": 3350, "A100-PCIE-40GB": 1555, "A100": 1935, "L40S": 864, "L40": 864,
    "L4": 300, "A10": 600, "A40": 696, "V100": 900, "T4": 320, "P40": 347, "P100": 732,
    "RX 7900 XTX": 960, "RX 7900 XT": 800, "RX 7800 XT": 624, "RX 7700 XT": 432, "RX 7600": 288,
    "RX 6900 XT": 512, "RX 6800 XT": 512, "RX 6800": 512, "RX 6700 XT": 384, "RX 6600": 224,
    "RX 9070 XT": 640, "RX 9070": 640, "MI300X": 5300, "MI210": 1638, "MI100": 1228, "MI50": 1024,
    "Arc B580": 456, "Arc A770": 560, "Arc A750": 512,
    "M1 Ultra": 800, "M1 Max": 400, "M1 Pro": 200, "M1": 68, "M2 Ultra": 800, "M2 Max": 400, "M2 Pro": 200, "M2": 100,
    "M3 Ultra": 819, "M3 Max": 400, "M3 Pro": 150, "M3": 100, "M4 Max": 546, "M4 Pro": 273, "M4": 120,
}  # fmt: skip
"""Nominal memory bandwidth in GB/s by what a device's name contains; the longest such name counts."""

_BY_KIND = {"gpu": 300, "igpu": 60, "accel": 40, "cpu": 40}
_REMOTE_DEFAULT = 40
"""A worker whose device is not known may as well be a CPU."""
_EFFICIENCY = (0.45, 0.9)
"""Least and greatest part of the nominal bandwidth that is reached."""
_MEASURED_EFFICIENCY = (0.7, 1.0)
"""The same of a bandwidth that was measured with one product after another; a model does more than that."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds per token: `best_s` with an empty cache and full bandwidth, `worst_s` with a full one and little."""

    best_s: float
    worst_s: float

    @property
    def middle_s(self) -> float:
        return (self.best_s + self.worst_s) / 2

    def corrected(self, ratio: float) -> Prediction:
        """Return the prediction where tokens of such layouts took `ratio` times the middle of what was predicted.

        What was measured is surer than what was computed: the range is half as wide.
        """
        middle_s, half_s = self.middle_s * ratio, (self.worst_s - self.best_s) * ratio / 4
        return Prediction(middle_s - half_s, middle_s + half_s)

    def text(self) -> str:
        """Return tokens per second for people."""
        return f"{_rate(self.worst_s)} to {_rate(self.best_s)} tokens per second"


_LOCAL = Link(20e-6, 10 * _GB)
_LOOPBACK_LINK = Link(100e-6, 2 * _GB)
_NETWORK = Link(500e-6, 110_000_000)


@cache
def _known_name(device_name: str) -> str | None:
    """Return the longest of the known names that `device_name` contains as words."""
    return next(
        (
            name
            for name in sorted(KNOWN_BANDWIDTHS, key=len, reverse=True)
            if re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", device_name, re.IGNORECASE)
        ),
        None,
    )


def bandwidth(device: Device, speeds: Speeds = NO_MEASUREMENTS) -> float:
    """Return the bytes per second that `device` reads: measured, of a known card, or usual for its kind."""
    measured = speeds.bandwidths.get(device.id)
    if measured is not None:
        return measured
    name = _known_name(device.name)
    if name is not None and not device.is_host:
        return KNOWN_BANDWIDTHS[name] * float(_GB)
    return (_REMOTE_DEFAULT if device.is_rpc else _BY_KIND[device.kind]) * float(_GB)


def link(device: Device, speeds: Speeds = NO_MEASUREMENTS) -> Link:
    """Return what it costs to hand a token's activations to `device`."""
    measured = speeds.links.get(device.id)
    if measured is not None:
        return measured
    if device.endpoint is None:
        return _LOCAL
    return _LOOPBACK_LINK if _LOOPBACK.match(device.endpoint) else _NETWORK


@dataclass(frozen=True, slots=True)
class Work:
    """What a model does per token: `layers` and `output_bytes` as drawn, the width of its activations, and the part
    of its experts that a token uses."""

    model: ModelFile
    layers: Sequence[LayerBytes]
    output_bytes: int

    @property
    def hop_bytes(self) -> int:
        width = self.model.hyper_parameter("embedding_length")
        return _ACTIVATION_BYTES * (width if isinstance(width, int) else 0)

    @property
    def expert_share(self) -> float:
        used, count = (self.model.hyper_parameter(f"expert_{key}") for key in ("used_count", "count"))
        if not isinstance(used, int) or not isinstance(count, int) or not 0 < used <= count:
            return 1.0
        return used / count


def predict(layout: Layout, work: Work, rig: Rig, speeds: Speeds = NO_MEASUREMENTS) -> Prediction:
    """Return the time per token."""
    devices = {device.id: device for device in rig.all_devices}
    rates = {device_id: bandwidth(device, speeds) for device_id, device in devices.items()}
    reading, caches = _read_bytes(layout, work, devices)
    link_s = 0.0
    for device_id in _hops(layout, work):
        cost = link(devices[device_id], speeds)
        link_s += cost.latency_s + work.hop_bytes / cost.bytes_per_second
    best_s = worst_s = link_s
    for device_id, size in reading.items():
        low, high = _MEASURED_EFFICIENCY if device_id in speeds.bandwidths else _EFFICIENCY
        best_s += size / rates[device_id] / high
        worst_s += (size + caches[device_id]) / rates[device_id] / low
    ratio = speeds.ratios.get(layout_class(layout, rig))
    return Prediction(best_s, worst_s) if ratio is None else Prediction(best_s, worst_s).corrected(ratio)


def _read_bytes(layout: Layout, work: Work, ids: Iterable[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the weights that a token reads on each device, and the caches when they are full."""
    weights = dict.fromkeys(ids, 0.0)
    caches = dict.fromkeys(weights, 0.0)
    places = layout.assignment()
    for layer, device_id in zip(work.layers, places, strict=True):
        weights[device_id] += layer.weights_bytes - layer.expert_bytes * (1 - work.expert_share)
        caches[device_id] += layer.kv_bytes
    for index, tensor, device_id in moved_tensors(work.model, layout):
        size = tensor.size_bytes * (work.expert_share if part_of_tensor(tensor.name) == "experts" else 1.0)
        weights[places[index]] -= size
        weights[device_id] += size
    weights[layout.output_device] += work.output_bytes
    return weights, caches


def _hops(layout: Layout, work: Work) -> Iterator[str]:
    """Yield a device for each time that a token's activations cross its link; the CPU has none."""
    places = [CPU_ID, *(run.device for run in layout.runs), layout.output_device]
    crossings = [pair for pair in pairwise(places) if pair[0] != pair[1]]
    moved = {(index, device_id) for index, _, device_id in moved_tensors(work.model, layout)}
    for index, device_id in sorted(moved):
        crossings += [(layout.device_of(index), device_id)] * 2
    for pair in crossings:
        yield from (device_id for device_id in pair if device_id != CPU_ID)


def _rate(seconds: float) -> str:
    rate = 1 / max(seconds, 1e-9)
    if rate < 1:
        return f"{rate:.2g}"
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"
