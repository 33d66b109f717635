"""Taking load off devices until a layout goes within given limits, by moving as little as can be found quickly.

Every number comes from the estimate of a whole layout, because compute buffers depend on all of it. What the user
decided stays: the split mode, pinned layers, the order of devices, overrides, devices that are off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

from engine.devices.device import CPU_ID, Rig
from engine.fit.layer_moves import moves_off, pushed_to_cpu
from engine.fit.shares import shares_within
from engine.layout.layout import Layout, single_device
from engine.memory.model_memory import ModelMemory
from engine.memory.side_files import NO_SIDE_FILES, SideFiles
from engine.plan.preview import make_report
from engine.plan.report import FitReport
from engine.settings.context_settings import ContextSettings

MAX_ESTIMATES = 160
"""Layouts estimated for one answer: a person waits for it."""

_Step = Callable[[int], Layout | None]
"""What becomes of a layout when so many layers are taken off a device; None where that cannot be."""
_Taking = tuple[_Step, int]
"""A step, and the most layers that it can take."""


class Relief:
    """One model with one set of settings on one rig. `pins` are layers (the output layer too) and where they stay."""

    def __init__(
        self,
        memory: ModelMemory,
        rig: Rig,
        context: ContextSettings,
        *,
        side_files: SideFiles = NO_SIDE_FILES,
        pins: Mapping[int, str] | None = None,
        off: Collection[str] = (),
    ) -> None:
        self._memory, self._rig, self._context, self._side_files = memory, rig, context, side_files
        self._pins = dict(pins or {})
        self._off = frozenset(off) | {device.id for device in rig.devices if device.kind == "accel"}
        self._reports: dict[Layout, FitReport] = {}
        self._needs: dict[Layout, dict[str, int]] = {}
        self._left = 0

    def needs(self, layout: Layout) -> Mapping[str, int]:
        """Return what `layout` takes of each device, in bytes."""
        found = self._needs.get(layout)
        if found is None:
            found = self._needs[layout] = {row.id: row.need_bytes for row in self._report(layout).rows}
        return found

    def _report(self, layout: Layout) -> FitReport:
        found = self._reports.get(layout)
        if found is None:
            self._left -= 1
            found = make_report(self._memory, self._rig, layout, self._context, self._side_files)
            self._reports[layout] = found
        return found

    def short(self, layout: Layout, limits: Mapping[str, int]) -> dict[str, int]:
        """Return the devices on which `layout` takes more than `limits` allow, and how much more in bytes."""
        found = self.needs(layout)
        over = {device: found[device] - limit for device, limit in limits.items() if found[device]}
        return {device: size for device, size in over.items() if size > 0}

    def is_allowed(self, layout: Layout) -> bool:
        """Return whether `layout` breaks no rule of the engine and leaves pinned layers where they are."""
        if any(layout.device_of(layer) != device for layer, device in self._pins.items()):
            return False
        return not self._report(layout).violations

    def within(self, layout: Layout, limits: Mapping[str, int]) -> Layout | None:
        """Return the layout nearest to `layout` that was found within `limits` (bytes by device), None if none was."""
        self._left = MAX_ESTIMATES
        if layout.split_mode == "layer":
            return self._between_layers(layout, limits)
        if layout.split_mode == "none":
            return self._on_one_device(layout, limits)
        if layout.split_mode == "tensor":
            found = shares_within(layout, limits, self.needs)
            return found if found is not None and self.is_allowed(found) else None
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
        return self._without(layout, device, limits)

    def _steps(self, layout: Layout, device: str, limits: Mapping[str, int]) -> tuple[list[_Taking], list[_Taking]]:
        """Return ways to take layers off `device`: to other devices, and to the CPU."""
        room = {name: limit - self.needs(layout)[name] for name, limit in limits.items()}
        targets = [name for name in room if name != device and name not in self._off and room[name] > 0]
        targets.sort(key=lambda name: (name == CPU_ID, -room[name]))
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

        def is_enough(count: int) -> bool:
            found = step(count)
            return found is None or device not in self.short(found, limits)

        if not fits_elsewhere(1):
            return None
        wanted = _first(1, most, is_enough)
        if not fits_elsewhere(wanted):
            wanted = _first(1, wanted, lambda count: not fits_elsewhere(count)) - 1
        return step(wanted)

    def _without(self, layout: Layout, device: str, limits: Mapping[str, int]) -> Layout | None:
        """Return `layout` with all of a device on another: where even one layer is too much, or overrides name it."""
        for target in sorted(limits, key=lambda name: name == CPU_ID):
            if target == device or target in self._off:
                continue
            moved = layout.replace_device(device, target)
            if moved != layout and not self.short(moved, limits) and self.is_allowed(moved):
                return moved
        return None

    # ------------------------------------------------------------------ mode none

    def _on_one_device(self, layout: Layout, limits: Mapping[str, int]) -> Layout | None:
        if not self.short(layout, limits):
            return layout
        return self._without(layout, layout.runs[0].device, limits)


def _with_output(layout: Layout, target: str, _count: int) -> Layout:
    return layout.move_output(target)


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the first number from `low` to `high` for which `holds`, by halving; `high` if none does."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
