"""The check whether a model fits beside the loaded models, and the choice of loaded models to unload if it does not.

A model may need the CPU for some layers only because other models hold memory of the GPUs. `find_whole` finds the
models to unload so that it fits on the GPUs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

from msgspec import Struct

from engine.devices.device import CPU_ID, Rig
from engine.planning.fit.loaded_models import HeldModel, choose_victims, eviction_order, rows_fit
from engine.planning.layout.layout import Layout
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow, missing_bytes

_Leaving = Sequence[HeldModel]


class UnloadPlan(Struct, frozen=True):
    """Whether another load fits beside the loaded models, and which of these to unload if it does not.

    `victims`: models to unload first; empty if the load can begin.
    `short`: (device id, missing bytes) of each device that lacks memory while the victims are loaded.
    `still_short`: (device id, missing bytes) of each device that lacks memory even after the victims are unloaded.
    `workers`: ids of RPC workers that the load needs and loaded models use.
    """

    victims: tuple[HeldModel, ...] = ()
    short: tuple[tuple[str, int], ...] = ()
    still_short: tuple[tuple[str, int], ...] = ()
    workers: tuple[str, ...] = ()


def plan_unloads(
    rows: Sequence[DeviceRow], others: Sequence[HeldModel], rig_without: Callable[[_Leaving], Rig]
) -> UnloadPlan:
    """Return which models have to be unloaded before a load that needs the memory of `rows`.

    If unloading all of `others` is not enough, the result names all models that use a device without enough memory.
    The user may then try the load all the same, because a forecast may be wrong.

    `rows`: forecast of the memory that the load needs, one row for each device.
    `others`: loaded models that the load does not replace.
    `rig_without`: returns the rig with the free memory after the given models were unloaded.
    """
    rig = rig_without(())
    if rows_fit(rows, rig):
        return UnloadPlan()
    victims = choose_victims(others, lambda leaving: rows_fit(rows, rig_without(leaving)))
    short = tuple(missing_bytes(rows, rig).items())
    # A forecast may be wrong, so people may still load: they see what would have to go.
    if victims is None:
        ids = {device for device, _ in short}
        endpoints = {device.endpoint for device in rig.devices if device.id in ids}
        victims = tuple(model for model in others if ids & model.held_bytes.keys() or endpoints & model.endpoints)
    still_short = tuple(missing_bytes(rows, rig_without(victims)).items())
    used = {row.id for row in rows if row.need_bytes}
    workers = tuple(each.id for each in rig.devices if each.is_rpc and each.holdings and each.id in used)
    return UnloadPlan(victims, short, still_short, workers)


MAX_CHOICES = 16
"""Largest number of choices of models to unload that are tried for one layout.

Each choice takes a search for a layout.
"""


class WholeWithout(Struct, frozen=True):
    """A layout with the whole model on devices other than the CPU, which is possible if idle models are unloaded.

    `victims`: the models to unload.
    `plan`: the plan with this layout, on the rig without the victims.
    """

    victims: tuple[HeldModel, ...]
    plan: Plan


def is_whole(plan: Plan) -> bool:
    """Return whether the plan fits and has all layers with all their weights on devices other than the CPU."""
    layout = plan.edit.layout
    moved = any(override.device == CPU_ID for override in layout.overrides)
    return CPU_ID not in layout.devices and not moved and plan.report.fits


def choices_to_unload(
    others: Sequence[HeldModel], rig_without: Callable[[_Leaving], Rig]
) -> tuple[tuple[tuple[HeldModel, ...], Rig], ...]:
    """Return choices of idle models to unload, each with the rig after the unload.

    Choices with few models come first. There are at most `MAX_CHOICES`. Models that hold memory of the CPU only are not
    included.
    """
    idle = sorted(
        (model for model in others if not model.is_busy and any(name != CPU_ID for name in model.held_bytes)),
        key=eviction_order,
    )
    choices = [choice for count in range(1, len(idle) + 1) for choice in combinations(idle, count)]
    # All together stay a choice however many there are.
    kept = choices[: MAX_CHOICES - 1] + choices[MAX_CHOICES - 1 :][-1:]
    return tuple((choice, rig_without(choice)) for choice in kept)


def find_whole(
    plan: Plan, choices: Sequence[tuple[tuple[HeldModel, ...], Rig]], find_layout: Callable[[Plan], Layout]
) -> WholeWithout | None:
    """Return the first of `choices` that lets the whole model fit on devices other than the CPU, and the plan for it.

    None if no choice frees enough memory. A layout is searched for each choice, so this function must not be called in
    the GUI thread.

    `choices`: (models to unload, rig after the unload).
    `find_layout`: returns a good layout for the model, settings and rig of a plan.
    """
    if not choices:
        return None
    # If it does not help that all are gone, less does not either.
    *fewer, most = choices
    last = _whole(plan.on(most[1]), find_layout)
    if last is None:
        return None
    for victims, rig in fewer:
        found = _whole(plan.on(rig), find_layout)
        if found is not None:
            return WholeWithout(victims, found)
    return WholeWithout(most[0], last)


def _whole(plan: Plan, find_layout: Callable[[Plan], Layout]) -> Plan | None:
    found = plan.with_layout(find_layout(plan))
    return found if is_whole(found) else None
