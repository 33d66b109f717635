"""Changes of a layout's split mode that need a memory forecast.

For mode none the single device is chosen. Overrides that a mode does not allow are removed.
"""

from __future__ import annotations

from engine.base.language import tr_count
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device
from engine.planning.fit.proposal import Proposal
from engine.planning.layout.layout import Layout, Override, SplitMode, single_device
from engine.planning.layout.split_modes import layout_in_mode
from engine.planning.plan.plan import Plan
from engine.planning.speed.prediction import CostModel
from engine.planning.speed.speeds import NO_MEASUREMENTS, Speeds
from engine.planning.speed.work import TokenWork

_ABOUT_AS_SHORT = 1.1
"""Two devices count as equally short of memory if their missing bytes differ by at most this factor.

The missing bytes of equal cards differ by the memory that the desktop uses.
"""


def layout_in_split_mode(plan: Plan, mode: SplitMode, speeds: Speeds = NO_MEASUREMENTS) -> Layout:
    """Return the layout of `plan` changed to split mode `mode`.

    For mode none, the best device for the whole model is chosen.
    """
    layout = plan.edit.layout
    if mode != "none" or mode == layout.split_mode:
        return layout_in_mode(layout, mode, plan.rig)
    return _on_one_device(plan.with_own_tables(), speeds)


def _on_one_device(plan: Plan, speeds: Speeds) -> Layout:
    """Return a layout with the whole model on the fastest device with enough memory.

    If no device has enough, the fastest of the devices that lack the fewest bytes is used. Small differences of the
    missing bytes (`_ABOUT_AS_SHORT`) are ignored.
    """
    # Devices of kind accel, such as BLAS, compute in host memory and hold no layers.
    devices = [device for device in plan.rig.devices if device.kind != "accel"] or [plan.rig.host]
    # What overrides take to the CPU may be why one device is enough. What they take to another device is over.
    kept = tuple(override for override in plan.edit.layout.overrides if override.device == CPU_ID)
    plans = [plan.with_layout(_layout_on(device, plan, kept)) for device in devices]
    missing = [_missing_bytes(each) for each in plans]
    least_bytes = min(missing)
    work = TokenWork(plan.model)

    def token_s(found: Plan) -> float:
        costs = CostModel(work, found.rig, found.settings, found.memory.for_context(found.settings), speeds)
        return costs.answer(found.edit.layout).token_s

    good = [each for each, size in zip(plans, missing, strict=True) if size <= least_bytes * _ABOUT_AS_SHORT]
    return min(good, key=token_s).edit.layout


def _layout_on(device: Device, plan: Plan, overrides: tuple[Override, ...]) -> Layout:
    alone = single_device(plan.model.n_layers, device.id)
    return replace(alone, split_mode="none", overrides=overrides)


def _missing_bytes(plan: Plan) -> int:
    return sum(row.shortfall_bytes for row in plan.forecast if row.is_short)


def without_refused_overrides(plan: Plan) -> Proposal | None:
    """Return a proposal to remove the tensor overrides that the plan's split mode does not allow.

    None if the split mode allows all overrides. Overrides to the CPU are kept if it allows them. Other problems of the
    plan stay.
    """
    if not any(each.rule == "split_override" for each in plan.violations):
        return None
    layout = plan.edit.layout
    to_cpu = tuple(override for override in layout.overrides if override.device == CPU_ID)
    for kept in (to_cpu, ()):
        tried = plan.with_layout(replace(layout, overrides=kept))
        if not any(each.rule == "split_override" for each in tried.violations):
            dropped = len(layout.overrides) - len(kept)
            text = tr_count("Drop {count} override", "Drop {count} overrides", dropped)
            return Proposal(text, tried.edit, "", "layout", tried.forecast)
    return None
