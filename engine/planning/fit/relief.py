"""Search for small changes of a layout that bring it within memory limits.

A step back (the next layout after a failed load) may combine several changes; a proposal is a single change. Split
mode, pinned layers, order of devices, overrides and unused devices stay as the user chose them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TypeVar

from msgspec import Struct

from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.model.gguf.model_file import ModelFile
from engine.planning.fit.needs import Needs, first_number
from engine.planning.fit.shares import shares_within
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, Constraints
from engine.planning.layout.engine_parameters import entry_count
from engine.planning.layout.layout import Layout, Override, Run, single_device
from engine.planning.plan.plan import Plan

MAX_ESTIMATES = 160
"""Largest number of layouts that are estimated for one step back (the next layout after a failed load).

It is small because the user waits for the result.
"""
MAX_CHANGE_ESTIMATES = 32
"""Largest number of layouts that are estimated for one proposal.

It is small because several proposals are searched after a failed load.
"""

_Step = Callable[[int], Layout | None]
"""A function that moves a given number of layers off a device.

It returns the new layout, or None if so many layers cannot move.
"""
_BoundedStep = tuple[_Step, int]
"""A function that moves layers off a device (`_Step`), and the largest number of layers that it can move."""


# ---------------------------------------------------------------------- moves


class Move(Struct, frozen=True):
    """A move of layers from one end of a run (neighbouring layers on one device) to the device `target`.

    `from_end`: whether layers at the end of the run move first; otherwise those at its start.
    """

    run: Run
    target: str
    from_end: bool

    def layers(self, count: int) -> tuple[int, int]:
        """Return the first and the last of the `count` layers that move."""
        if self.from_end:
            return self.run.last - count + 1, self.run.last
        return self.run.first, self.run.first + count - 1

    def after(self, layout: Layout, count: int) -> Layout:
        """Return `layout` with `count` layers moved."""
        return layout.move_range(*self.layers(count), self.target)


def moves_off(layout: Layout, devices: Collection[str], targets: Sequence[str]) -> list[Move]:
    """Return moves from both ends of each run on `devices` to each target, in the order in which they should be tried.

    A run is a range of neighbouring layers on one device. The criteria of the order are, the most important first:
    1. moves to the device of a neighbouring run;
    2. moves to other devices than the CPU;
    3. moves that add fewer entries to llama.cpp's device list;
    4. moves to earlier devices of `targets`;
    5. moves that leave the output layer on its device;
    6. moves from longer runs.

    `targets`: ids of devices that may get layers, the best first.
    """
    moves: list[tuple[tuple[int, ...], Move]] = []
    runs = layout.runs
    for index, run in enumerate(runs):
        if run.device not in devices:
            continue
        for rank, target in enumerate(targets):
            for from_end in (True, False):
                neighbour = index + 1 if from_end else index - 1
                near = 0 <= neighbour < len(runs) and runs[neighbour].device == target
                move = Move(run, target, from_end)
                with_output = from_end and index == len(runs) - 1
                more = entry_count(move.after(layout, 1)) - entry_count(layout)
                # False sorts before True.
                order = (not near, target == CPU_ID, max(0, more), rank, with_output, -run.length, not from_end)
                moves.append((order, move))
    return [move for _, move in sorted(moves, key=lambda pair: pair[0])]


class ExpertMove(Struct, frozen=True):
    """A move of experts to the CPU, from the last layers of a range on one device. Attention and KV cache stay."""

    run: Run

    def layers(self, count: int) -> tuple[int, int]:
        """Return the first and the last of the `count` layers whose experts move."""
        return self.run.last - count + 1, self.run.last

    def after(self, layout: Layout, count: int) -> Layout:
        """Return `layout` with the experts of `count` layers on the CPU."""
        first, last = self.layers(count)
        # Of several overrides that match a tensor llama.cpp uses the first.
        return replace(layout, overrides=(Override(CPU_ID, part="experts", first=first, last=last), *layout.overrides))


def experts_off(layout: Layout, model: ModelFile, devices: Collection[str]) -> list[ExpertMove]:
    """Return moves of experts from `devices` to the CPU, those of the longest ranges of layers first.

    Experts that an override has already moved are left out.
    """
    moves = [ExpertMove(run) for device in devices if device != CPU_ID for run in _expert_runs(layout, model, device)]
    return sorted(moves, key=lambda move: (-move.run.length, move.run.first))


def _expert_runs(layout: Layout, model: ModelFile, device: str) -> Iterator[Run]:
    """Yield ranges of neighbouring layers on `device` whose experts are on it too."""
    here: list[int] = []
    # The empty name after the last layer ends the last range.
    for layer, where in enumerate((*layout.assignment(), "")):
        if where == device and _has_experts(layout, model, layer):
            here.append(layer)
        elif here:
            yield Run(device, here[0], here[-1])
            here = []


def _has_experts(layout: Layout, model: ModelFile, layer: int) -> bool:
    taken = (each.part == "experts" and (each.layers is None or layer in each.layers) for each in layout.overrides)
    return model.blocks[layer].expert_bytes > 0 and not any(taken)


def pushed_to_cpu(layout: Layout, device: str, count: int) -> Layout | None:
    """Return `layout` with `count` more CPU layers at the front, and `count` fewer layers in the first run of `device`.

    A run is a range of neighbouring layers on one device. The runs in between keep their lengths, and begin `count`
    layers later. None if the run of `device` has fewer than `count` layers.
    """
    # Only CPU layers at the front can use op offload. So all runs before that of `device` move up by `count` layers.
    runs = layout.runs
    run_index = next((index for index, run in enumerate(runs) if run.device == device), None)
    if run_index is None or runs[run_index].length < count:
        return None
    leading = runs[0].length if runs[0].device == CPU_ID else 0
    between = [run.device for run in runs[:run_index] for _ in range(run.length)][leading:]
    assignment = [CPU_ID] * (leading + count) + between
    pushed = layout
    for layer, target in enumerate(assignment):
        pushed = pushed.assign(layer, target) if pushed.device_of(layer) != target else pushed
    return pushed


# ---------------------------------------------------------------------- relief

_AnyMove = TypeVar("_AnyMove", Move, ExpertMove)


class Relief:
    """Searches for layouts of `plan` that need no more memory than devices may use (the limits of `needs`).

    Pinned layers stay on their device. Devices that `constraints` exclude get no layers.
    """

    def __init__(self, plan: Plan, needs: Needs, constraints: Constraints = NO_CONSTRAINTS) -> None:
        self._plan, self.needs = plan, needs
        self._pins = {layer: pin.device for pin in constraints.pins for layer in range(pin.first, pin.last + 1)}
        self._constraints = constraints
        if constraints.output is not None:
            self._pins[plan.model.n_layers] = constraints.output
        # Devices of kind accel, such as BLAS, compute in host memory and hold no layers.
        off = constraints.off_beside(plan.edit.layout, plan.rig)
        self._off = off | {device.id for device in plan.rig.devices if device.kind == "accel"}

    def is_allowed(self, layout: Layout) -> bool:
        """Return whether `layout` breaks no rule of llama.cpp and has pinned layers and parts on their devices."""
        if any(layout.device_of(layer) != device for layer, device in self._pins.items()):
            return False
        if not all(pin.is_kept(layout) for pin in self._constraints.parts):
            return False
        return not self.needs.plan(layout).violations

    def goes(self, layout: Layout) -> bool:
        """Return whether `layout` is allowed (`is_allowed`) and exceeds no device's memory limit."""
        return not self.needs.short(layout) and self.is_allowed(layout)

    def _targets(self, layout: Layout, avoid: Collection[str]) -> list[str]:
        """Return the ids of the devices that may get layers, except `avoid`: most free memory first, the CPU last."""
        room = self.needs.room(layout)
        targets = [name for name in room if name not in avoid and name not in self._off]
        return sorted(targets, key=lambda name: (name == CPU_ID, -room[name]))

    # ------------------------------------------------------------------ one change that is enough

    def moved_layers(self, layout: Layout, devices: Collection[str]) -> tuple[Move, int] | None:
        """Return the first move of layers off `devices` that makes `layout` fit, and the number of layers to move.

        The number is the smallest that suffices. None if no single move is enough. Moves are tried in the order of
        `moves_off`.
        """
        return self._enough_moved(layout, moves_off(layout, devices, self._targets(layout, devices)))

    def moved_experts(self, layout: Layout, devices: Collection[str]) -> tuple[ExpertMove, int] | None:
        """Return the first move of experts to the CPU that makes `layout` fit, and the number of layers to move.

        The number is the smallest that suffices. None if no single move is enough.
        """
        return self._enough_moved(layout, [] if CPU_ID in self._off else experts_off(layout, self._plan.model, devices))

    def changed_shares(self, layout: Layout) -> Layout | None:
        """Return `layout`, which is in split mode tensor, with other shares that fit the limits (`shares_within`).

        None if no shares fit, or if the found layout is not allowed.
        """
        found = shares_within(layout, self.needs)
        return found if found is not None and self.is_allowed(found) else None

    def without(self, layout: Layout, device: str, avoid: Collection[str] = ()) -> tuple[str, Layout] | None:
        """Move everything on `device` to one other device; return (id of that device, new layout).

        Devices in `avoid` are not used. None if no device has room.
        """
        for target in self._targets(layout, {device, *avoid}):
            moved = layout.replace_device(device, target)
            if moved != layout and self.goes(moved):
                return target, moved
        return None

    def _enough_moved(self, layout: Layout, moves: Sequence[_AnyMove]) -> tuple[_AnyMove, int] | None:
        """Return the first of `moves` that makes `layout` fit the limits, and the number of layers to move.

        The number is the smallest that suffices. None if no move is enough, or after `MAX_CHANGE_ESTIMATES` estimates.
        """
        if layout.split_mode not in ("layer", "none"):
            return None
        self.needs.left = MAX_CHANGE_ESTIMATES
        short = self.needs.short(layout).keys()
        too_small: set[Run] = set()
        for move in moves:
            if self.needs.left <= 0:
                return None
            if move.run in too_small:
                continue
            step = partial(move.after, layout)
            if not self._relieves(step, short, move.run.length):
                # The run is too short for its device, whichever device would take it. The same run needs no other
                # target.
                too_small.add(move.run)
                continue
            # The more layers leave, the less the device needs, so the first number that is enough can be bisected.
            count = first_number(1, move.run.length, partial(self._relieves, step, short))
            if self.goes(step(count)):
                return move, count
        return None

    def _relieves(self, step: _Step, devices: Collection[str], count: int) -> bool:
        """Return whether `devices` are within their limits after `step` moved `count` layers off a device.

        Limits of other devices are not checked. The result is also True if `step` cannot move so many layers, because
        the caller then searches among smaller numbers.
        """
        found = step(count)
        return found is None or not self.needs.is_short(found, devices)

    # ------------------------------------------------------------------ the nearest layout within limits

    def nearest(self, layout: Layout) -> Layout | None:
        """Return a layout within the memory limits that differs little from `layout`; None if none was found."""
        self.needs.left = MAX_ESTIMATES
        if layout.split_mode == "layer":
            return self._between_layers(layout)
        if layout.split_mode == "none":
            return self._all_off(layout, layout.runs[0].device) if self.needs.short(layout) else layout
        if layout.split_mode == "tensor":
            return self.changed_shares(layout)
        return None  # Mode row is not forecast, so no limit can be kept to.

    def on_cpu(self, layout: Layout) -> Layout:
        """Return `layout` with everything on the CPU, except layers and parts that are pinned to other devices."""
        found = single_device(layout.n_layers, CPU_ID)
        for layer, device in self._pins.items():
            found = found.assign(layer, device)
        return self._constraints.with_parts(found.move_output(self._pins.get(layout.n_layers, CPU_ID)))

    def _between_layers(self, layout: Layout) -> Layout | None:
        seen: set[Layout] = set()
        while short := self.needs.short(layout):
            relieved = self._less_on(layout, max(short, key=lambda device: short[device]))
            # A layout that was seen before would lead to the same steps without end.
            if relieved is None or relieved in seen or self.needs.left <= 0:
                return None
            seen.add(relieved)
            layout = relieved
        return layout

    def _less_on(self, layout: Layout, device: str) -> Layout | None:
        """Return `layout` after one move of layers off `device`.

        The move brings the device within its limit, or else reduces its need as much as possible. None if no move
        reduces the need.
        """
        # Other devices come first: layers on the CPU cost the most speed.
        needs, short = self.needs, self.needs.short(layout).keys()
        for steps in self._steps(layout, device):
            best = layout
            for step, most in steps:
                found = self._enough(step, most, device, short)
                if found is None:
                    continue
                if not needs.is_short(found, (device,)):
                    return found
                if needs.of(found)[device].need_bytes < needs.of(best)[device].need_bytes:
                    best = found
            if best is not layout:
                return best
        return self._all_off(layout, device)

    def _steps(self, layout: Layout, device: str) -> tuple[list[_BoundedStep], list[_BoundedStep]]:
        """Return the possible moves of layers off `device` in two lists: to other devices, and to the CPU.

        Each element has a function that returns the layout after a number of layers moved, and the largest number.
        """
        room = self.needs.room(layout)
        targets = [name for name in self._targets(layout, (device,)) if room[name] > 0]
        to_devices: list[_BoundedStep] = []
        to_cpu: list[_BoundedStep] = []
        longest = max((run.length for run in layout.runs if run.device == device), default=0)
        if CPU_ID in targets and longest:
            to_cpu.append((partial(pushed_to_cpu, layout, device), longest))
        for move in moves_off(layout, (device,), targets):
            steps = to_cpu if move.target == CPU_ID else to_devices
            steps.append((partial(move.after, layout), move.run.length))
        # An output layer on the device of the last layer moves with that layer, so only one apart has a step of its
        # own.
        if layout.output_device == device and layout.runs[-1].device != device:
            for target in targets:
                steps = to_cpu if target == CPU_ID else to_devices
                steps.append((partial(_with_output, layout, target), 1))
        return to_devices, to_cpu

    def _enough(self, step: _Step, most: int, device: str, short: Collection[str]) -> Layout | None:
        """Move the fewest layers off `device` that bring it within its limit, and return the new layout.

        If these would push another device over its limit, only as many are moved as that device can take. None if it
        cannot take any.

        `step`: returns the layout after a given number of layers moved.
        `most`: largest number of layers to move.
        `short`: ids of devices that exceed their limits already; the new layout may exceed these limits too.
        """

        def fits_elsewhere(count: int) -> bool:
            found = step(count)
            return found is not None and self.is_allowed(found) and self.needs.short(found).keys() <= set(short)

        if not fits_elsewhere(1):
            return None
        wanted = first_number(1, most, partial(self._relieves, step, (device,)))
        if not fits_elsewhere(wanted):
            # As many as other devices can take. The next round goes on from there.
            wanted = first_number(1, wanted, lambda count: not fits_elsewhere(count)) - 1
        return step(wanted)

    def _all_off(self, layout: Layout, device: str) -> Layout | None:
        found = self.without(layout, device)
        return None if found is None else found[1]


def _with_output(layout: Layout, target: str, _count: int) -> Layout:
    return layout.move_output(target)
