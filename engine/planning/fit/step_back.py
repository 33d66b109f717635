"""The next layout to try after one that did not fit: what devices turned out to have is learnt, and never forgotten.

A load that ran out of memory tells what a device really gave; a probe tells what the engine plans beyond our estimate.
From all that was tried follows one limit for each device, and the layout nearest to the last one within these.
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
"""At this back-off nothing is left of a device that refused memory."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A device that refused memory: bytes it was asked for, had free (None: it does not tell) and had given before."""

    device: str
    requested_bytes: int
    free_bytes: int | None
    placed_bytes: int

    @property
    def capacity_bytes(self) -> int:
        """The most that it can be hoped to give in all."""
        asked_bytes = self.placed_bytes + self.requested_bytes - 1
        return asked_bytes if self.free_bytes is None else min(asked_bytes, self.placed_bytes + self.free_bytes)


@dataclass(frozen=True, slots=True)
class Tried:
    """A layout that was tried. `rows` are the best that is known of what it takes, probed where that could be had.

    `refusal` None: it was not loaded, because the rows do not fit. `tenths` is the back-off that it was planned with.
    """

    layout: Layout
    rows: tuple[DeviceRow, ...]
    refusal: Refusal | None = None
    tenths: int = 0


@dataclass(frozen=True, slots=True)
class NextLayout:
    """The next layout, the back-off it was planned with, and what was changed, in words."""

    layout: Layout
    tenths: int
    change: str


def step_back(plan: Plan, history: Sequence[Tried], constraints: Constraints = NO_CONSTRAINTS) -> NextLayout | None:
    """Return what to try after all of `history`, whose last layout is stepped back from; None: nothing is left.

    `plan` is what was asked for: its settings and side files stay.

    A device that refused gets fewer bytes than in any layout that it refused, and less than it really gave by a tenth
    for every refusal so far. Where that leads to no new layout, the back-off grows; last comes the CPU alone.
    Split mode, settings, overrides, pinned layers and devices that are off stay as the user has them.
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
        if tenths == MAX_TENTHS or all(each.refusal is None for each in history):
            break
        tenths += 1
    on_cpu = relief.on_cpu(last.layout)
    if on_cpu in past or CPU_ID in relief.needs.short(on_cpu) or not relief.is_allowed(on_cpu):
        return None
    return NextLayout(on_cpu, tenths, change_words(last.layout, on_cpu))


def _limits(needs: Needs, rig: Rig, history: Sequence[Tried], tenths: int) -> dict[str, int]:
    """Return the most bytes that the estimate of the next layout may have on each device."""
    limits = dict(needs.limits)
    for tried in history:
        estimated = needs.of(tried.layout)
        for row in tried.rows:
            # What the engine plans beyond the estimate of one layout it may plan again in the next.
            unseen_bytes = max(0, row.need_bytes - (estimated[row.id].need_bytes if row.id in estimated else 0))
            limits[row.id] = min(limits[row.id], _available_bytes(rig, row.id) - unseen_bytes)
    for tried in history:
        if tried.refusal is not None and tried.refusal.device in limits:
            device = tried.refusal.device
            overhead_bytes = next((row.overhead_bytes for row in tried.rows if row.id == device), 0)
            given_bytes = tried.refusal.capacity_bytes * (MAX_TENTHS - tenths) // MAX_TENTHS + overhead_bytes
            below_bytes = needs.of(tried.layout)[device].need_bytes - 1
            limits[device] = min(limits[device], given_bytes, below_bytes)
    return limits


def _available_bytes(rig: Rig, device_id: str) -> int:
    device = rig.device(device_id)
    return 0 if device is None else device.available_bytes - device.margin_bytes


def change_words(before: Layout, after: Layout) -> str:
    """Return what moved, such as "layers 4-5 from RPC0 to CPU, the output layer from RPC1 to CPU"."""
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
    return ", ".join(moved) or tr("what overrides moved")


def layout_words(layout: Layout) -> str:
    """Return what each device holds, such as "layers 0-3 on CPU, layers 4-7 on RPC0"."""
    return share_words(layout) if layout.split_mode in ("tensor", "row") else describe_runs(layout)


def shortage_words(rows: Sequence[DeviceRow]) -> str:
    """Return which devices are short by how much, such as "RPC0 by 12.0 MiB"."""
    return ", ".join(
        tr("{id} by {shortfall}", id=row.id, shortfall=format_bytes(row.shortfall_bytes))
        for row in rows
        if row.is_short
    )
