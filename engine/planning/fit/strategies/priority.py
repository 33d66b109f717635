"""Strategy "priority": devices are filled one after another, in the order that the user chose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from engine.base.language import tr
from engine.devices.device import CPU_ID
from engine.planning.fit.needs import largest_number
from engine.planning.fit.strategies.choosing import (
    Candidate,
    all_on_cpu,
    describe_rest,
    describe_runs,
    name_list,
)
from engine.planning.fit.strategies.expert_filling import fill_with_experts
from engine.planning.fit.strategies.filling import fill, whole_layouts
from engine.planning.fit.strategies.workbench import Workbench
from engine.planning.layout.layout import Layout


def priority_candidates(bench: Workbench) -> Iterator[Candidate]:
    """Yield the layout with the whole model on one device: the first in the user's order with enough memory.

    If no device has enough, yield layouts that fill the devices one after another in this order.
    """
    order = bench.in_preferred_order()
    in_order = name_list(order)
    if not bench.constraints.split:
        whole = {device.id: layout for device, layout in whole_layouts(bench)}
        first = next((device_id for device_id in order if device_id in whole), None)
        if first is not None:
            yield Candidate(
                whole[first],
                tr(
                    "{first} is the first device in the order {in_order} with room for the whole model.",
                    first=first,
                    in_order=in_order,
                ),
            )
            return
    layout = _filled_in_order(bench, order)
    if layout.devices == (CPU_ID,):
        yield Candidate(layout, all_on_cpu(bench))
    else:
        yield Candidate(
            layout,
            tr(
                "The devices are filled one after another, in the order {in_order}: {describe_runs}.{describe_rest}",
                in_order=in_order,
                describe_runs=describe_runs(layout),
                describe_rest=describe_rest(bench, layout),
            ),
        )
    sparse = None if bench.holds_all(layout) else fill_with_experts(bench, order)
    if sparse is not None:
        yield Candidate(
            sparse,
            tr(
                "The devices are filled with layers, then with experts, in the order {in_order}: "
                "{describe_runs}.{describe_rest}",
                in_order=in_order,
                describe_runs=describe_runs(sparse),
                describe_rest=describe_rest(bench, sparse),
            ),
        )


def _filled_in_order(bench: Workbench, order: Sequence[str]) -> Layout:
    """Return a layout with the devices filled one after another, with layers in the same order as the devices.

    The last device has the output layer. If layers are pinned, or if devices cannot be filled this way, the layers may
    be in another order.
    """
    # Filling goes from the last layer to the first. Done backwards it tells which devices are needed, how many layers
    # each takes at most, and how many stay on the CPU, which come first.
    backwards = fill(bench, order[::-1])
    used = [device_id for device_id in order if device_id in backwards.devices]
    if bench.pinned or len(used) < 2:
        return backwards
    counts = {device_id: backwards.assignment().count(device_id) for device_id in used}
    n_on_cpu = bench.n_layers - sum(counts.values())
    # Elsewhere in the order a device may take a layer less or more: the output layer and buffers are not where they
    # were. What is left over then goes to the CPU.
    for leading in range(n_on_cpu, min(n_on_cpu + len(used), bench.n_layers - 1) + 1):
        layout = _from_the_front(bench, used, counts, leading)
        if layout is not None:
            return layout
    return backwards


def _from_the_front(bench: Workbench, ids: Sequence[str], counts: Mapping[str, int], leading: int) -> Layout | None:
    """Return a layout with `leading` layers on the CPU and the others on `ids` in order; None if a device lacks memory.

    `counts`: estimated number of layers for each device. It only affects how long the search takes.
    """
    assignment = [CPU_ID] * bench.n_layers
    assignment[leading:] = [ids[-1]] * (bench.n_layers - leading)
    start = leading
    for device_id in ids[:-1]:

        def filled(count: int, device_id: str = device_id, start: int = start) -> Layout:
            return bench.layout([*assignment[:start], *[device_id] * count, *assignment[start + count :]])

        def goes(count: int, device_id: str = device_id, layout: Callable[[int], Layout] = filled) -> bool:
            return not bench.is_short({device_id}, layout(count))

        count = largest_number(bench.n_layers - start, goes, counts[device_id])
        assignment[start : start + count] = [device_id] * count
        start += count
    layout = bench.layout(assignment)
    return None if bench.shortfalls(layout) else layout
