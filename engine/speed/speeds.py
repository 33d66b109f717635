"""What is known of the speed of devices, links and layouts, as values that predictions are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engine.devices.device import CPU_ID, Rig
from engine.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class Link:
    """What one hop to a device costs: seconds for itself, and bytes per second."""

    latency_s: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """What counts instead of the tables, by device id: the bytes per second that F16 weights are read with, those of
    other types where they were measured, the seconds that a computation without weights takes, and the link.

    `products`: weights times tokens per second, by type, where many tokens are multiplied at once.

    Learnt from answers: `factors`, how many times longer than predicted a device takes, under `LINKS` what goes between
    devices; and `ratios` by class of layout (`layout_class`), what is left of the difference then. `prompt_factors` and
    `prompt_ratios` are the same of prompts.
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
        """The same without what answers taught."""
        return replace(self, ratios={}, factors={}, prompt_ratios={}, prompt_factors={})


NO_MEASUREMENTS = Speeds()
LINKS = "links"
"""No device has this id where devices are known by backend and place."""


def layout_class(layout: Layout, rig: Rig) -> str:
    """Return what a layout has in common with others whose predictions are wrong alike: where its weights are read."""
    used = {*layout.devices, *(override.device for override in layout.overrides)}
    kinds = set()
    for device in rig.all_devices:
        if device.id in used:
            kinds.add("cpu" if device.id == CPU_ID else "remote" if device.is_rpc else device.kind)
    several = " several" if len(used - {CPU_ID}) > 1 else ""
    moved = " overrides" if layout.overrides else ""
    return f"{layout.split_mode} {'+'.join(sorted(kinds))}{several}{moved}"
