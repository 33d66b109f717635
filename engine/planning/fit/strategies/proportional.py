"""Strategy "proportional": each device gets layers in proportion to its free memory less a fixed reserve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.base.language import tr
from engine.base.units import GIB
from engine.devices.device import CPU_ID
from engine.planning.fit.strategies.choosing import (
    Candidate,
    all_on_cpu,
    describe_rest,
    describe_runs,
    name_list,
)
from engine.planning.fit.strategies.fewest import capacity_layout, whole_reason
from engine.planning.fit.strategies.filling import fill, whole_layouts
from engine.planning.fit.strategies.workbench import Workbench
from engine.planning.layout.layout import Layout

HEADROOM_BYTES = 2 * GIB
_LEAST_DIVISOR = 8


def memory_shares(free: Sequence[int]) -> tuple[int, ...]:
    """Return the share of each device: free bytes less `HEADROOM_BYTES`, but at least an eighth of the free bytes."""
    return tuple(max(free_bytes - HEADROOM_BYTES, free_bytes // _LEAST_DIVISOR) for free_bytes in free)


def proportional_counts(
    blocks: Sequence[int], shares: Sequence[int], other_bytes: int = 0, main: int = 0
) -> tuple[int, ...]:
    """Return the number of layers for each device.

    A device gets at least one layer, and further layers until the next layer would exceed its share of all bytes. The
    last device gets the remaining layers.

    `blocks`: bytes of each layer.
    `shares`: share of each device.
    `other_bytes`: bytes of the model outside of its layers. One device has all of them, and therefore fewer layers.
    `main`: index of that device in `shares`.
    """
    total = sum(shares)
    if not shares or not total:
        return (0,) * len(shares)
    everything = sum(blocks) + other_bytes
    budgets = [
        everything * share // total - (other_bytes if index == main else 0) for index, share in enumerate(shares)
    ]
    counts = [0] * len(shares)
    device, taken = 0, 0
    for size in blocks:
        # `counts[device]`: a device gets one block at least, even one that is larger than its part.
        if device < len(shares) - 1 and counts[device] and taken + size > max(0, budgets[device]):
            device, taken = device + 1, 0
        counts[device] += 1
        taken += size
    return tuple(counts)


def proportional_layout(bench: Workbench) -> Layout | None:
    """Return the layout with layers in proportion to `memory_shares` of all devices. The layout may not fit.

    None if no device has free memory.
    """
    ids = bench.in_layer_order(bench.devices)
    free = {device.id: device.available_bytes for device in bench.devices}
    sizes = [layer.weights_bytes + layer.kv_bytes for layer in bench.layers]
    shares = memory_shares([free[device_id] for device_id in ids])
    if not any(shares):
        return None
    counts = proportional_counts(sizes, shares, bench.output_bytes, len(ids) - 1)
    return bench.layout([device_id for device_id, count in zip(ids, counts, strict=True) for _ in range(count)])


def proportional_candidates(bench: Workbench) -> Iterator[Candidate]:
    """Yield the layout on a single device if one holds everything; else layouts with layers in proportion to memory."""
    if not bench.constraints.split:
        for device, layout in whole_layouts(bench):
            yield Candidate(layout, whole_reason(bench, device))
            return
    shared = proportional_layout(bench)
    if shared is not None and not bench.shortfalls(shared):
        yield Candidate(
            shared,
            tr(
                "Each device gets layers in proportion to its free memory minus 2 GiB: {describe_runs}.",
                describe_runs=describe_runs(shared),
            ),
        )
    searched = None if bench.pinned else capacity_layout(bench, spread=True)
    filled = fill(bench, bench.in_layer_order(bench.devices))
    for layout in (filled,) if searched is None else (searched, filled):
        used = [device_id for device_id in layout.devices if device_id != CPU_ID]
        if not used:
            yield Candidate(layout, all_on_cpu(bench))
            continue
        yield Candidate(
            layout,
            tr(
                "Layers in proportion to free memory would not fit on every device, so {name_list} share the layers "
                "in proportion to how many layers fit on each: {describe_runs}.{describe_rest}",
                name_list=name_list(used),
                describe_runs=describe_runs(layout),
                describe_rest=describe_rest(bench, layout),
            ),
        )
