"""Strategy priority: the user's device order, one filled before the next."""

from __future__ import annotations

from collections.abc import Iterator

from engine.devices.device import CPU_ID, Rig
from engine.fit.strategies.constraints import NO_CONSTRAINTS, AutoLayout, Constraints
from engine.fit.strategies.wording import describe_rest, describe_runs, name_list
from engine.fit.strategies.workbench import Candidate, Workbench
from engine.layout.context_settings import ContextSettings
from engine.memory.model_memory import ModelMemory


def priority(
    memory: ModelMemory, rig: Rig, context: ContextSettings, constraints: Constraints = NO_CONSTRAINTS
) -> AutoLayout:
    """Return the layout that fills the preferred device first, from the output layer downwards."""
    bench = Workbench(memory, rig, context, constraints)
    return bench.choose(priority_candidates(bench))


def priority_candidates(bench: Workbench) -> Iterator[Candidate]:
    """Yield the first device in order that holds everything, and the filling in order."""
    order = bench.in_preferred_order()
    in_order = name_list(order)
    if not bench.constraints.split:
        whole = {device.id: layout for device, layout in bench.whole_layouts()}
        first = next((device_id for device_id in order if device_id in whole), None)
        if first is not None:
            yield Candidate(whole[first], f"{first} is the first in the order {in_order} that holds everything.")
            return
    layout = bench.fill(order[::-1])
    if layout.devices == (CPU_ID,):
        yield Candidate(layout, f"In the order {in_order} no device has room for a layer: all stay on the CPU.")
        return
    yield Candidate(
        layout,
        f"In the order {in_order} each device is filled before the next, from the output layer downwards: "
        f"{describe_runs(layout)}.{describe_rest(layout)}",
    )
