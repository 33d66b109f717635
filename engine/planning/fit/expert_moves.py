"""Moves experts between devices and the CPU, and predicts the effect on memory and speed.

A layout can have the experts of a given number of layers on a device, of as many layers as fit, or of none.
"""

from __future__ import annotations

from msgspec import Struct

from engine.devices.device import CPU_ID
from engine.planning.fit.needs import Needs, largest_number
from engine.planning.layout.counts import expert_layers, with_expert_count
from engine.planning.layout.layout import Layout
from engine.planning.layout.parts import part_device, place_parts
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import plan_speed
from engine.planning.speed.prediction import SpeedForecast
from engine.planning.speed.speeds import Speeds
from engine.planning.speed.work import TokenWork


class ExpertOutcome(Struct, frozen=True):
    """Result of moving experts to other devices: the new layout's memory and speed, compared with the old layout's.

    `n_layers`: number of layers whose experts move.
    `moved_bytes`: bytes of these experts.
    `before`, `after`: predicted speeds; None if a layout does not fit, or if its speed cannot be predicted.
    """

    n_layers: int
    moved_bytes: int
    fits: bool
    before: SpeedForecast | None = None
    after: SpeedForecast | None = None


def layers_with_experts(plan: Plan) -> tuple[int, ...]:
    """Return the indices of the layers that have mixture-of-experts tensors."""
    return tuple(block.index for block in plan.model.blocks if block.expert_bytes)


def all_to_cpu(plan: Plan) -> Layout:
    """Return the layout with the experts of every layer on the CPU."""
    return place_parts(plan.edit.layout, "experts", dict.fromkeys(layers_with_experts(plan), CPU_ID))


def back_as_fit(plan: Plan) -> Layout:
    """Move as many experts as fit from the CPU back to the devices of their layers, and return the new layout.

    On each device, experts of the last layers move first. So the experts that stay on the CPU belong to the first
    layers of each device.
    """
    layout = plan.edit.layout
    limits = {
        device.id: max(0, device.available_bytes - device.margin_bytes)
        for device in plan.rig.devices
        if device.kind != "accel"
    }
    needs = Needs(plan, limits)
    away = expert_layers(layout, CPU_ID, layers_with_experts(plan))
    for device_id in dict.fromkeys(run.device for run in layout.runs if run.device != CPU_ID):
        own = [layer for layer in reversed(away) if layout.device_of(layer) == device_id]
        if not own or device_id not in limits:
            continue
        base = layout

        def tried(count: int, base: Layout = base, own: list[int] = own, home: str = device_id) -> Layout:
            return place_parts(base, "experts", dict.fromkeys(own[:count], home))

        def goes(count: int, home: str = device_id, make: object = tried) -> bool:
            assert callable(make)
            return not needs.is_short(make(count), (home,))

        # The largest experts give a guess that rarely is too high. It only shortens the search.
        each_bytes = max(plan.model.blocks[layer].expert_bytes for layer in own)
        guess = max(0, needs.room(base)[device_id]) // max(each_bytes, 1)
        layout = tried(largest_number(len(own), goes, min(guess, len(own))))
    return layout


def by_count(plan: Plan, device: str, count: int, speeds: Speeds) -> Layout:
    """Return the layout with the experts of `count` layers on device `device`.

    They are the first or the last layers with experts, whichever is predicted to be faster.

    Raises:
        LayoutError: fewer than `count` layers have experts; or `device` is the CPU and more than `count` layers are
            on the CPU, so that their experts cannot leave it.
    """
    found = with_expert_count(plan.edit.layout, device, count, layers_with_experts(plan))
    if len(found) == 1:
        return found[0]
    work = TokenWork(plan.model)

    def cost(layout: Layout) -> tuple[float, int]:
        speed = plan_speed(work, plan.with_layout(layout), speeds)
        # Rounded, so that of nearly equal speeds the layout with fewer overrides is chosen.
        return (float("inf") if speed is None else float(f"{speed.token_s:.5g}"), len(layout.overrides))

    return min(found, key=cost)


def outcome(plan: Plan, layout: Layout, speeds: Speeds) -> ExpertOutcome:
    """Return how memory and speed change if `layout` replaces the layout of `plan`.

    The two layouts have experts of some layers on different devices.
    """
    now, work, changed = plan.edit.layout, TokenWork(plan.model), plan.with_layout(layout)
    moved = [
        layer
        for layer in layers_with_experts(plan)
        if part_device(now, "experts", layer) != part_device(layout, "experts", layer)
    ]
    return ExpertOutcome(
        len(moved),
        sum(plan.model.blocks[layer].expert_bytes for layer in moved),
        changed.report.fits,
        plan_speed(work, plan, speeds) if plan.report.fits else None,
        plan_speed(work, changed, speeds) if changed.report.fits else None,
    )
