"""The next layout to try after one that did not fit.

A load that ran out of memory shows how much a device really has, and a probe how much the engine plans beyond our
estimate. All attempts together give one limit for each device. The next layout is the nearest to the last one within
these limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.devices.device import CPU_ID, Rig
from engine.planning.fit.needs import Needs
from engine.planning.fit.relief import Relief
from engine.planning.fit.shares import share_words
from engine.planning.fit.strategies.choosing import describe_runs
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, Constraints
from engine.planning.layout.layout import Layout, layer_words
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow, usable_bytes

MAX_TENTHS = 10
"""Largest back-off, in tenths of the capacity: nothing is left of a device that refused memory."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A device that refused an allocation.

    `requested_bytes`: size of the refused allocation; None if the engine did not say it.
    `placed_bytes`: bytes that it had given before.
    `free_bytes`: free memory at that time; None if the device does not report it.
    """

    device: str
    requested_bytes: int | None
    free_bytes: int | None
    placed_bytes: int

    @property
    def capacity_bytes(self) -> int:
        """Most bytes that the device can have in all: less than was refused, at most placed and reported free bytes."""
        if self.requested_bytes is None:
            return self.placed_bytes + (self.free_bytes or 0)
        asked_bytes = self.placed_bytes + self.requested_bytes - 1
        return asked_bytes if self.free_bytes is None else min(asked_bytes, self.placed_bytes + self.free_bytes)


@dataclass(frozen=True, slots=True)
class Tried:
    """A layout that was tried.

    `rows`: its memory on each device, probed if possible, else estimated.
    `refusal`: None if it was not loaded, because the rows do not fit.
    `tenths`: the back-off with which it was planned.
    """

    layout: Layout
    rows: tuple[DeviceRow, ...]
    refusal: Refusal | None = None
    tenths: int = 0


@dataclass(frozen=True, slots=True)
class NextLayout:
    """The next layout to try. `tenths`: back-off with which it was planned. `change`: the moved layers, in words."""

    layout: Layout
    tenths: int
    change: str


def step_back(plan: Plan, history: Sequence[Tried], constraints: Constraints = NO_CONSTRAINTS) -> NextLayout | None:
    """Return the layout to try after those of `history`, near the last of them; None if none is left.

    A device that refused memory gets fewer bytes than in any layout that it refused. In addition it gets less than its
    capacity, by a tenth for every refusal so far. If that gives no new layout, the back-off grows; the last layout to
    try is the CPU alone. Split mode, overrides, pinned layers and devices that are off stay as the user chose them.

    `plan`: the plan as asked for. Its settings and side files stay.
    """
    last = history[-1]
    needs = Needs(plan, usable_bytes(plan.rig))
    past = {each.layout for each in history}
    tenths = min(MAX_TENTHS, max(each.tenths for each in history) + (last.refusal is not None))
    while True:
        relief = Relief(plan, needs.within(_limits(needs, plan.rig, history, tenths)), constraints)
        found = relief.nearest(last.layout)
        if found is not None and found not in past:
            return NextLayout(found, tenths, change_words(last.layout, found))
        # The back-off is for devices that refused memory. Without a refusal a larger one changes no limit.
        if tenths == MAX_TENTHS or all(each.refusal is None for each in history):
            break
        tenths += 1
    on_cpu = relief.on_cpu(last.layout)
    if on_cpu in past or CPU_ID in relief.needs.short(on_cpu) or not relief.is_allowed(on_cpu):
        return None
    return NextLayout(on_cpu, tenths, change_words(last.layout, on_cpu))


def _limits(needs: Needs, rig: Rig, history: Sequence[Tried], tenths: int) -> dict[str, int]:
    """Return the upper limit of the next layout's estimate on each device, in bytes."""
    limits = dict(needs.limits)
    for tried in history:
        estimated = needs.of(tried.layout)
        for row in tried.rows:
            # The engine may plan the same bytes beyond our estimate in the next layout.
            unseen_bytes = max(0, row.need_bytes - (estimated[row.id].need_bytes if row.id in estimated else 0))
            limits[row.id] = min(limits[row.id], _available_bytes(rig, row.id) - unseen_bytes)
    for tried in history:
        if tried.refusal is not None and tried.refusal.device in limits:
            device = tried.refusal.device
            overhead_bytes = next((row.overhead_bytes for row in tried.rows if row.id == device), 0)
            given_bytes = tried.refusal.capacity_bytes * (MAX_TENTHS - tenths) // MAX_TENTHS + overhead_bytes
            # At least one byte less than what was refused, or the search could return the same layout.
            below_bytes = needs.of(tried.layout)[device].need_bytes - 1
            limits[device] = min(limits[device], given_bytes, below_bytes)
    return limits


def _available_bytes(rig: Rig, device_id: str) -> int:
    device = rig.device(device_id)
    return 0 if device is None else device.available_bytes - device.margin_bytes


def change_words(before: Layout, after: Layout) -> str:
    """Return the moved layers, such as "layers 4-5 from RPC0 to CPU, the output layer from RPC1 to CPU"."""
    if after.split_mode in ("tensor", "row"):
        return tr("shares {share}", share=share_words(after))
    pairs = list(zip(before.assignment(), after.assignment(), strict=True))
    moved: list[str] = []
    start = 0
    for layer, pair in enumerate(pairs):
        if layer + 1 < len(pairs) and pairs[layer + 1] == pair:
            continue
        if pair[0] != pair[1]:
            moved.append(
                tr("{layer} from {pair} to {pair2}", layer=layer_words(start, layer), pair=pair[0], pair2=pair[1])
            )
        start = layer + 1
    if before.output_device != after.output_device:
        moved.append(
            tr(
                "the output layer from {output_device} to {output_device2}",
                output_device=before.output_device,
                output_device2=after.output_device,
            )
        )
    return ", ".join(moved) or tr("tensors moved by overrides")


def layout_words(layout: Layout) -> str:
    """Return the layers of each device, such as "layers 0-3 on CPU, layers 4-7 on RPC0"."""
    return share_words(layout) if layout.split_mode in ("tensor", "row") else describe_runs(layout)


def shortage_words(rows: Sequence[DeviceRow]) -> str:
    """Return the short devices with their shortfalls, such as "RPC0 by 12.0 MiB"."""
    return ", ".join(
        tr("{id} by {shortfall}", id=row.id, shortfall=format_bytes(row.shortfall_bytes))
        for row in rows
        if row.is_short
    )
