"""Search for the next layout to try after one that did not fit.

A load that ran out of memory shows how much memory a device really has. A probe (a load without allocation) shows how
much more memory llama.cpp needs than the estimate. All loads and probes of earlier layouts together give one memory
limit for each device. The next layout is the one within these limits that differs least from the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.devices.device import CPU_ID, Rig
from engine.planning.fit.needs import Needs
from engine.planning.fit.relief import Relief
from engine.planning.fit.shares import share_text
from engine.planning.fit.strategies.choosing import describe_runs
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, Constraints
from engine.planning.layout.layout import Layout, layer_text
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow, usable_bytes

MAX_TENTHS = 10
"""Largest back-off: the part of a device's capacity that stays unused after a failed allocation, in tenths.

With this value, nothing is planned on a device that ran out of memory.
"""


class Refusal(Struct, frozen=True):
    """A failed allocation on a device.

    `requested_bytes`: size of the failed allocation; None if llama.cpp did not report it.
    `free_bytes`: free memory at that time; None if the device does not report it.
    `placed_bytes`: bytes that the load had already allocated on the device.
    """

    device: str
    requested_bytes: int | None
    free_bytes: int | None
    placed_bytes: int

    @property
    def capacity_bytes(self) -> int:
        """Largest number of bytes that the load could have allocated on the device.

        It is less than `placed_bytes` plus `requested_bytes`, because that allocation failed, and at most
        `placed_bytes` plus `free_bytes`. A value that is None is ignored.
        """
        if self.requested_bytes is None:
            return self.placed_bytes + (self.free_bytes or 0)
        asked_bytes = self.placed_bytes + self.requested_bytes - 1
        return asked_bytes if self.free_bytes is None else min(asked_bytes, self.placed_bytes + self.free_bytes)


class Tried(Struct, frozen=True):
    """A layout that was tried.

    `rows`: memory of the layout on each device, from a probe if possible, else estimated.
    `refusal`: failed allocation of the load; None if the layout was not loaded, because its rows do not fit.
    `backoff_tenths`: tenths of the capacity that had to stay unused on devices with a failed allocation.
    """

    layout: Layout
    rows: tuple[DeviceRow, ...]
    refusal: Refusal | None = None
    backoff_tenths: int = 0


class NextLayout(Struct, frozen=True):
    """The next layout to try.

    `backoff_tenths`: tenths of the capacity that stay unused on devices with a failed allocation.
    `change`: the moved layers, as a phrase for the user.
    """

    layout: Layout
    backoff_tenths: int
    change: str


def step_back(plan: Plan, history: Sequence[Tried], constraints: Constraints = NO_CONSTRAINTS) -> NextLayout | None:
    """Return the next layout to try: one near the last layout of `history`; None if there are no more layouts to try.

    A device on which an allocation failed gets fewer bytes than in any layout that failed on it. A part of its capacity
    stays unused as well: one tenth for each failure so far, and more if that leads to no new layout. The last layout to
    try has everything on the CPU. Split mode, overrides, pinned layers and disabled devices stay as the user chose
    them.

    `plan`: the plan that the user wanted; its settings and side files are used.
    `history`: all layouts tried so far, the latest last.
    """
    last = history[-1]
    needs = Needs(plan, usable_bytes(plan.rig))
    past = {each.layout for each in history}
    backoff_tenths = min(MAX_TENTHS, max(each.backoff_tenths for each in history) + (last.refusal is not None))
    while True:
        relief = Relief(plan, needs.within(_limits(needs, plan.rig, history, backoff_tenths)), constraints)
        found = relief.nearest(last.layout)
        if found is not None and found not in past:
            return NextLayout(found, backoff_tenths, change_text(last.layout, found))
        # The back-off is for devices that refused memory. Without a refusal a larger one changes no limit.
        if backoff_tenths == MAX_TENTHS or all(each.refusal is None for each in history):
            break
        backoff_tenths += 1
    on_cpu = relief.on_cpu(last.layout)
    if on_cpu in past or CPU_ID in relief.needs.short(on_cpu) or not relief.is_allowed(on_cpu):
        return None
    # Pinned layers stay on their device, which may have refused as much before.
    needed = needs.of(on_cpu)
    if any(needed[id].need_bytes > most_bytes for id, most_bytes in _refused_limits(needs, history, 0).items()):
        return None
    return NextLayout(on_cpu, backoff_tenths, change_text(last.layout, on_cpu))


def _limits(needs: Needs, rig: Rig, history: Sequence[Tried], backoff_tenths: int) -> dict[str, int]:
    """Return the upper limit in bytes for the next layout's estimated need of each device, by device id.

    If an earlier layout needed more than its estimate, the difference is subtracted: the next layout may need it too.

    `backoff_tenths`: tenths of the capacity that stay unused on devices with a failed allocation.
    """
    limits = dict(needs.limits)
    for tried in history:
        estimated = needs.of(tried.layout)
        for row in tried.rows:
            # The engine may plan the same bytes beyond our estimate in the next layout.
            unseen_bytes = max(0, row.need_bytes - (estimated[row.id].need_bytes if row.id in estimated else 0))
            limits[row.id] = min(limits[row.id], _available_bytes(rig, row.id) - unseen_bytes)
    for device, most_bytes in _refused_limits(needs, history, backoff_tenths).items():
        limits[device] = min(limits[device], most_bytes)
    return limits


def _refused_limits(needs: Needs, history: Sequence[Tried], backoff_tenths: int) -> dict[str, int]:
    """Return the upper limit in bytes that follows from failed allocations alone, by id of the device that refused."""
    limits: dict[str, int] = {}
    for tried in history:
        if tried.refusal is not None and tried.refusal.device in needs.limits:
            device = tried.refusal.device
            overhead_bytes = next((row.overhead_bytes for row in tried.rows if row.id == device), 0)
            given_bytes = tried.refusal.capacity_bytes * (MAX_TENTHS - backoff_tenths) // MAX_TENTHS + overhead_bytes
            # At least one byte less than what was refused, or the search could return the same layout.
            below_bytes = needs.of(tried.layout)[device].need_bytes - 1
            limits[device] = min(limits.get(device, given_bytes), given_bytes, below_bytes)
    return limits


def _available_bytes(rig: Rig, device_id: str) -> int:
    device = rig.device(device_id)
    return 0 if device is None else device.available_bytes - device.margin_bytes


def change_text(before: Layout, after: Layout) -> str:
    """Return the moved layers as a phrase, such as "layers 4-5 from RPC0 to CPU, the output layer from RPC1 to CPU"."""
    if after.split_mode in ("tensor", "row"):
        return tr("the split over the devices becomes {share}", share=share_text(after))
    pairs = list(zip(before.assignment(), after.assignment(), strict=True))
    moved: list[str] = []
    start = 0
    for layer, pair in enumerate(pairs):
        if layer + 1 < len(pairs) and pairs[layer + 1] == pair:
            continue
        if pair[0] != pair[1]:
            moved.append(
                tr("{layer} from {before} to {after}", layer=layer_text(start, layer), before=pair[0], after=pair[1])
            )
        start = layer + 1
    if before.output_device != after.output_device:
        moved.append(
            tr(
                "the output layer from {before} to {after}",
                before=before.output_device,
                after=after.output_device,
            )
        )
    return ", ".join(moved) or tr("single tensors moved to other devices (overrides)")


def describe_layout(layout: Layout) -> str:
    """Return the layers of each device as a phrase, such as "layers 0-3 on CPU, layers 4-7 on RPC0"."""
    return share_text(layout) if layout.split_mode in ("tensor", "row") else describe_runs(layout)


def shortage_text(rows: Sequence[DeviceRow]) -> str:
    """Return the devices with missing bytes as a phrase, such as "RPC0 by 12.0 MiB"."""
    return ", ".join(
        tr("{id} by {shortfall}", id=row.id, shortfall=format_bytes(row.shortfall_bytes))
        for row in rows
        if row.is_short
    )
