"""`Needs`: the memory that layouts of one plan need on each device, compared with limits.

It is used by all searches for a layout: strategies, the next layout after a failed load, proposals. Each number is from
the estimate of a whole layout, because compute buffers depend on all of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from math import inf

from engine.planning.fit.strategies.constraints import SearchLimit
from engine.planning.layout.layout import Layout
from engine.planning.memory.drafts import uses_mtp
from engine.planning.memory.estimate import DeviceMemory
from engine.planning.memory.side_files import SideFiles
from engine.planning.plan.decisions.resolve import SideFileEstimate, estimate_with_side_files
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import device_needs, pooled_bytes, shortfalls


class Needs:
    """Estimates the memory of layouts for one plan, and compares it with limits of the devices.

    Model, rig, settings and side files are those of `plan`. Estimates are cached by layout.

    `limits`: usable bytes by device id; a device that is not included has no limit.
    `as_requested`: whether the user's settings are used unchanged. If False, values are chosen for settings on auto,
    for each layout as in a load.
    `watch`: counts the estimates, and can cancel the search.
    `left`: number of estimates that are still allowed. Each estimate reduces it; at 0 the caller ends its search.
    """

    def __init__(
        self, plan: Plan, limits: Mapping[str, int], *, as_requested: bool = False, watch: SearchLimit | None = None
    ) -> None:
        self.limits = limits
        self.left: float = inf
        self._plan = plan
        self._as_requested = as_requested
        self._watch = watch
        self._plans: dict[Layout, Plan] = {}
        self._known: dict[Layout, Mapping[str, DeviceMemory]] = {}

    def within(self, limits: Mapping[str, int]) -> Needs:
        """Return a copy with other limits, in bytes by device id. It shares the cached estimates with this object."""
        other = Needs(self._plan, limits, as_requested=self._as_requested, watch=self._watch)
        # What a layout needs does not depend on the limits.
        other._plans, other._known = self._plans, self._known
        return other

    def plan(self, layout: Layout) -> Plan:
        """Return the plan with `layout` in place of its own layout; plans are cached."""
        found = self._plans.get(layout)
        if found is None:
            found = self._plans[layout] = self._plan.with_layout(layout)
        return found

    def of(self, layout: Layout) -> Mapping[str, DeviceMemory]:
        """Return the memory of `layout` by device id.

        Raises:
            CancelledError: the search was cancelled by the watch.
        """
        found = self._known.get(layout)
        if found is None:
            self.left -= 1
            if self._watch is not None:
                self._watch.step()
            if self._as_requested:
                estimate = self.estimate_as_requested(layout, self._plan.edit.side_files).estimate
            else:
                estimate = self.plan(layout).resolved.estimate
            found = self._known[layout] = device_needs(estimate, self._plan.learned_rig)
        return found

    def least(self, layout: Layout) -> Mapping[str, DeviceMemory]:
        """Return the memory of `layout` without compute buffers, by device id.

        This is faster than `of`: no values are chosen for settings on auto.
        """
        plan = self._plan
        estimate = plan.memory.estimate(
            layout, plan.edit.context, plan.rig, with_compute=False, mtp=uses_mtp(plan.edit.side_files.draft)
        )
        return device_needs(estimate, plan.learned_rig)

    def estimate_as_requested(self, layout: Layout, side_files: SideFiles) -> SideFileEstimate:
        """Return the memory estimate of `layout` with `side_files`, and the devices of the side files.

        The user's settings are used unchanged: no values are chosen for settings on auto.
        """
        memory, rig, context = self._plan.memory, self._plan.rig, self._plan.edit.context
        return estimate_with_side_files(memory, rig, layout, context, side_files)

    def short(self, layout: Layout) -> dict[str, int]:
        """Return the bytes by which `layout` exceeds limits, by device id; only devices above their limit."""
        return shortfalls(self.of(layout), self.limits, self._plan.rig.pool)

    def is_short(self, layout: Layout, devices: Collection[str]) -> bool:
        """Return whether `layout` exceeds the limit of at least one of these devices."""
        # Weights and caches alone often show it, and are much quicker to estimate than compute buffers. That is only
        # possible for settings as asked for: decisions need the whole estimate.
        if (
            self._as_requested
            and layout not in self._known
            and not shortfalls(self.least(layout), self.limits, self._plan.rig.pool).keys().isdisjoint(devices)
        ):
            return True
        return not self.short(layout).keys().isdisjoint(devices)

    def room(self, layout: Layout) -> dict[str, int]:
        """Return the bytes that stay free below the limit with `layout`, by device id; negative above the limit."""
        needs = self.of(layout)
        room = {name: limit - needs[name].need_bytes for name, limit in self.limits.items()}
        pool = self._plan.rig.pool
        # Devices that share the host's memory can each have room while all of them together have none.
        if pool is not None:
            left_bytes = pool.limit_bytes - pooled_bytes(needs, pool)
            room.update({name: min(size, left_bytes) for name, size in room.items() if name in pool.ids})
        return room


def first_number(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the least number from `low` to `high` for which `holds` is true, by bisection.

    `holds` must be monotonic: false up to some number and true from there on. If it is false below `high`, the result
    is `high`, which is not tested.
    """
    # Valid only if `holds` is monotonic: once true, it stays true for all larger numbers.
    return low + bisect_left(range(low, high), x=True, key=holds)


def largest_number(high: int, holds: Callable[[int], bool], guess: int) -> int:
    """Return the largest number from 1 to `high` for which `holds` is true; 0 if there is none.

    `holds` must be monotonic: true up to some number and false from there on. `guess`: number that is tested first.
    """
    # Steps double away from `guess` until the answer is enclosed, then it is bisected: each call of `holds` may be an
    # estimate of milliseconds, and the guess is usually right or off by one.
    low, step = 0, 1
    from_below = from_above = False
    probe = guess
    while low < high:
        probe = min(max(probe, low + 1), high)
        if holds(probe):
            low, from_below = probe, True
            probe = low + step
        else:
            high, from_above = probe - 1, True
            probe = high - step + 1
        step *= 2
        if from_below and from_above:
            probe = (low + high + 1) // 2
    return low
