"""Strategy priority: the user's device order, one filled before the next."""

from __future__ import annotations

from collections.abc import Iterator

from engine.base.language import tr
from engine.devices.device import CPU_ID, Rig
from engine.planning.fit.strategies.choosing import (
    Candidate,
    all_on_cpu,
    choose,
    describe_rest,
    describe_runs,
    name_list,
)
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, AutoLayout, Constraints
from engine.planning.fit.strategies.expert_filling import fill_with_experts
from engine.planning.fit.strategies.filling import fill, whole_layouts
from engine.planning.fit.strategies.workbench import Workbench
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings


def priority(
    memory: ModelMemory, rig: Rig, context: ContextSettings, constraints: Constraints = NO_CONSTRAINTS
) -> AutoLayout:
    """Return the layout that fills the preferred device first, from the output layer downwards."""
    bench = Workbench(memory, rig, context, constraints)
    return choose(bench, priority_candidates(bench))


def priority_candidates(bench: Workbench) -> Iterator[Candidate]:
    """Yield the first device in order that holds everything, and the filling in order."""
    order = bench.in_preferred_order()
    in_order = name_list(order)
    if not bench.constraints.split:
        whole = {device.id: layout for device, layout in whole_layouts(bench)}
        first = next((device_id for device_id in order if device_id in whole), None)
        if first is not None:
            yield Candidate(
                whole[first],
                tr(
                    "{first} is the first in the order {in_order} that holds everything.",
                    first=first,
                    in_order=in_order,
                ),
            )
            return
    layout = fill(bench, order[::-1])
    if layout.devices == (CPU_ID,):
        yield Candidate(layout, all_on_cpu(bench))
    else:
        yield Candidate(
            layout,
            tr(
                "In the order {in_order} each device is filled before the next, from the output layer "
                "downwards: {describe_runs}.{describe_rest}",
                in_order=in_order,
                describe_runs=describe_runs(layout),
                describe_rest=describe_rest(bench, layout),
            ),
        )
    sparse = None if bench.holds_all(layout) else fill_with_experts(bench, order[::-1])
    if sparse is not None:
        yield Candidate(
            sparse,
            tr(
                "In the order {in_order} each device gets dense parts and then the experts that it has "
                "room for: {describe_runs}.{describe_rest}",
                in_order=in_order,
                describe_runs=describe_runs(sparse),
                describe_rest=describe_rest(bench, sparse),
            ),
        )
