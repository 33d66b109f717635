"""Taking load off devices until a layout goes within given limits, by moving as little as can be found quickly.

A step back moves on until a layout goes within them; a proposal is one change that does.

Every number comes from the estimate of a whole layout, because compute buffers depend on all of it. What the user
decided stays: the split mode, pinned layers, the order of devices, overrides, devices that are off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

from engine.devices.device import CPU_ID
from engine.fit.layer_moves import ExpertMove, Move, experts_off, moves_off, pushed_to_cpu
from engine.fit.shares import shares_within
from engine.fit.strategies.constraints import NO_CONSTRAINTS, Constraints
from engine.layout.layout import Layout, Run, single_device
from engine.plan.plan import Plan

MAX_ESTIMATES = 160
"""Layouts estimated for one step back: a person waits for it."""
MAX_CHANGE_ESTIMATES = 32
"""Layouts estimated for one change: several are looked for after a load that failed."""

_Step = Callable[[int], Layout | None]
"""What becomes of a layout when so many layers are taken off a device; None where that cannot be."""
_Taking = tuple[_Step, int]
"""A step, and the most layers that it can take."""
_AnyMove = TypeVar("_AnyMove", Move, ExpertMove)


class Relief:
    """What `plan` asks for with other layouts; what `constraints` pin stays, and devices that are off get nothing."""

    def __init__(self, plan: Plan, constraints: Constraints = NO_CONSTRAINTS) -> None:
        self._plan = plan
        self._pins = {layer: pin.device for pin in constraints.pins for layer in range(pin.first, pin.last + 1)}
        if constraints.output is not None:
            self._pins[plan.model.n_layers] = constraints.output
        self._off = constraints.off | {device.id for device in plan.rig.devices if device.kind == "accel"}
        self._plans: dict[Layout, Plan] = {}
        self._needs: dict[Layout, dict[str, int]] = {}
        self._left = 0

    def plan(self, layout: Layout) -> Plan:
        """Return the plan of `layout`, as it is estimated."""
        found = self._plans.get(layout)
        if found is None:
            self._left -= 1
            found = self._plans[layout] = self._plan.with_layout(layout)
        return found

    def needs(self, layout: Layout) -> Mapping[str, int]:
        """Return what `layout` takes of each device, in bytes."""
        found = self._needs.get(layout)
        if found is None:
            found = self._needs[layout] = {row.id: row.need_bytes for row in self.plan(layout).forecast}
        return found

    def short(self, layout: Layout, limits: Mapping[str, int]) -> dict[str, int]:
        """Return the devices on which `layout` takes more than `limits` allow, and how much more in bytes."""
        return excess(self.needs(layout), limits)

    def is_allowed(self, layout: Layout) -> bool:
        """Return whether `layout` breaks no rule of the engine and leaves pinned layers where they are."""
        if any(layout.device_of(layer) != device for layer, device in self._pins.items()):
            return False
        return not self.plan(layout).report.violations

    def targets(self, layout: Layout, limits: Mapping[str, int], avoid: Collection[str]) -> list[str]:
        """Return the devices that may take something, without `avoid`: those with most room first, the CPU last."""
        room = {name: limit - self.needs(layout)[name] for name, limit in limits.items()}
        targets = [name for name in room if name not in avoid and name not in self._off]
        return sorted(targets, key=lambda name: (name == CPU_ID, -room[name]))

    # ------------------------------------------------------------------ one change that is enough

    def moved_layers(
        self, layout: Layout, devices: Collection[str], limits: Mapping[str, int]
    ) -> tuple[Move, int] | None:
        """Return the move of layers off `devices` that leaves `layout` within `limits`, and the fewest that do.

        A neighbour takes them before others; see `moves_off`.
        """
        return self._enough_moved(layout, moves_off(layout, devices, self.targets(layout, limits, devices)), limits)

    def moved_experts(
        self, layout: Layout, devices: Collection[str], limits: Mapping[str, int]
    ) -> tuple[ExpertMove, int] | None:
        """Return the move of experts from `devices` to the CPU that leaves `layout` within `limits`, and the fewest."""
        moves = [] if CPU_ID in self._off else experts_off(layout, self._plan.model, devices)
        return self._enough_moved(layout, moves, limits)

    def changed_shares(self, layout: Layout, limits: Mapping[str, int]) -> Layout | None:
        """Return `layout` of mode tensor with other shares within `limits`."""
        found = shares_within(layout, limits, self.needs)
        return found if found is not None and self.is_allowed(found) else None

    def without(
        self, layout: Layout, device: str, limits: Mapping[str, int], avoid: Collection[str] = ()
    ) -> tuple[str, Layout] | None:
        """Return a device and `layout` with all of `device` moved there: where even one layer is too much, or overrides
        name it."""
        for target in self.targets(layout, limits, {device, *avoid}):
            moved = layout.replace_device(device, target)
            if moved != layout and not self.short(moved, limits) and self.is_allowed(moved):
                return target, moved
        return None

    def _enough_moved(
        self, layout: Layout, moves: Sequence[_AnyMove], limits: Mapping[str, int]
    ) -> tuple[_AnyMove, int] | None:
        """Return the first of `moves` that is enough, with the fewest layers; None where the search gets long."""
        if layout.split_mode not in ("layer", "none"):
            return None
        self._left = MAX_CHANGE_ESTIMATES
        short = self.short(layout, limits).keys()
        too_small: set[Run] = set()
        for move in moves:
            if self._left <= 0:
                return None
            if move.run in too_small:
                continue
            step = partial(move.after, layout)
            if not self._relieves(step, short, limits, move.run.length):
                too_small.add(move.run)
                continue
            count = _first(1, move.run.length, partial(self._relieves, step, short, limits))
            moved = step(count)
            if not self.short(moved, limits) and self.is_allowed(moved):
                return move, count
        return None

    def _relieves(self, step: _Step, devices: Collection[str], limits: Mapping[str, int], count: int) -> bool:
        """Return whether the step is enough for `devices`, whatever it does to others."""
        found = step(count)
        return found is None or self.short(found, limits).keys().isdisjoint(devices)

    # ------------------------------------------------------------------ the nearest layout within limits

    def within(self, layout: Layout, limits: Mapping[str, int]) -> Layout | None:
        """Return the layout nearest to `layout` that was found within `limits` (bytes by device), None if none was."""
        self._left = MAX_ESTIMATES
        if layout.split_mode == "layer":
            return self._between_layers(layout, limits)
        if layout.split_mode == "none":
            return self._on_one_device(layout, limits)
        if layout.split_mode == "tensor":
            return self.changed_shares(layout, limits)
        return None  # Mode row is not forecast, so no limit can be kept to.

    def on_cpu(self, layout: Layout) -> Layout:
        """Return `layout` with everything on the CPU that is not pinned elsewhere."""
        found = single_device(layout.n_layers, CPU_ID)
        for layer, device in self._pins.items():
            found = found.assign(layer, device)
        return found.move_output(self._pins.get(layout.n_layers, CPU_ID))

    # ------------------------------------------------------------------ mode layer

    def _between_layers(self, layout: Layout, limits: Mapping[str, int]) -> Layout | None:
        seen: set[Layout] = set()
        while short := self.short(layout, limits):
            relieved = self._less_on(layout, max(short, key=lambda device: short[device]), limits)
            if relieved is None or relieved in seen or self._left <= 0:
                return None
            seen.add(relieved)
            layout = relieved
        return layout

    def _less_on(self, layout: Layout, device: str, limits: Mapping[str, int]) -> Layout | None:
        """Return `layout` with as much taken off `device` as is needed, else as one step can; None: nothing can be.

        The CPU is slow: as long as another device takes something, it gets nothing.
        """
        short = self.short(layout, limits).keys()
        for steps in self._steps(layout, device, limits):
            best = layout
            for step, most in steps:
                found = self._enough(step, most, device, short, limits)
                if found is None:
                    continue
                if device not in self.short(found, limits):
                    return found
                if self.needs(found)[device] < self.needs(best)[device]:
                    best = found
            if best is not layout:
                return best
        return self._all_off(layout, device, limits)

    def _steps(self, layout: Layout, device: str, limits: Mapping[str, int]) -> tuple[list[_Taking], list[_Taking]]:
        """Return ways to take layers off `device`: to other devices, and to the CPU."""
        room = {name: limit - self.needs(layout)[name] for name, limit in limits.items()}
        targets = [name for name in self.targets(layout, limits, (device,)) if room[name] > 0]
        to_devices: list[_Taking] = []
        to_cpu: list[_Taking] = []
        longest = max((run.length for run in layout.runs if run.device == device), default=0)
        if CPU_ID in targets and longest:
            to_cpu.append((partial(pushed_to_cpu, layout, device), longest))
        for move in moves_off(layout, (device,), targets):
            steps = to_cpu if move.target == CPU_ID else to_devices
            steps.append((partial(move.after, layout), move.run.length))
        if layout.output_device == device and layout.runs[-1].device != device:
            for target in targets:
                steps = to_cpu if target == CPU_ID else to_devices
                steps.append((partial(_with_output, layout, target), 1))
        return to_devices, to_cpu

    def _enough(
        self, step: _Step, most: int, device: str, short: Collection[str], limits: Mapping[str, int]
    ) -> Layout | None:
        """Return the step with the fewest layers that relieve `device`, or as many as make nobody short who was not."""

        def fits_elsewhere(count: int) -> bool:
            found = step(count)
            return found is not None and self.is_allowed(found) and self.short(found, limits).keys() <= set(short)

        if not fits_elsewhere(1):
            return None
        wanted = _first(1, most, partial(self._relieves, step, (device,), limits))
        if not fits_elsewhere(wanted):
            wanted = _first(1, wanted, lambda count: not fits_elsewhere(count)) - 1
        return step(wanted)

    def _all_off(self, layout: Layout, device: str, limits: Mapping[str, int]) -> Layout | None:
        found = self.without(layout, device, limits)
        return None if found is None else found[1]

    # ------------------------------------------------------------------ mode none

    def _on_one_device(self, layout: Layout, limits: Mapping[str, int]) -> Layout | None:
        if not self.short(layout, limits):
            return layout
        return self._all_off(layout, layout.runs[0].device, limits)


def excess(needs: Mapping[str, int], limits: Mapping[str, int]) -> dict[str, int]:
    """Return by how many bytes each device is above its limit; one with nothing on it never is."""
    return {name: needs[name] - limit for name, limit in limits.items() if needs[name] and needs[name] > limit}


def _with_output(layout: Layout, target: str, _count: int) -> Layout:
    return layout.move_output(target)


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the first number from `low` to `high` for which `holds`, by halving; `high` if none does."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
