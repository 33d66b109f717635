"""Strategy "balanced", which leaves about the same number of bytes free on each used device."""

from __future__ import annotations

from collections.abc import Iterator

from engine.base.language import tr
from engine.base.units import format_bytes
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

_SEARCH_STEPS = 20
_MOVES = 128


def balanced_candidates(bench: Workbench) -> Iterator[Candidate]:
    """Yield the layout on a single device, if one holds everything; else the most evenly filled layout.

    If several devices hold everything, the one with the most memory left is used.
    """
    whole = {} if bench.constraints.split else dict(whole_layouts(bench))
    if whole:
        roomiest = max(whole, key=lambda device: min(_headroom(bench, whole[device]).values()))
        yield Candidate(whole[roomiest], whole_reason(bench, roomiest))
        return
    layout = balanced_layout(bench)
    used = [device_id for device_id in layout.devices if device_id != CPU_ID]
    if not used:
        yield Candidate(layout, all_on_cpu(bench))
    elif bench.holds_all(layout):
        left = _headroom(bench, layout).values()
        least, most = format_bytes(min(left)), format_bytes(max(left))
        yield Candidate(
            layout,
            tr(
                "After the load, {device} has {least} free in addition to the margin: {describe_runs}.",
                device=used[0],
                least=least,
                describe_runs=describe_runs(layout),
            )
            if len(used) == 1
            else tr(
                "After the load, {name_list} each have {least} to {most} free in addition to the margin: "
                "{describe_runs}.",
                name_list=name_list(used),
                least=least,
                most=most,
                describe_runs=describe_runs(layout),
            ),
        )
    else:
        why = (
            tr("The devices cannot hold all layers that are not pinned") if bench.pinned else tr("All devices are full")
        )
        yield Candidate(layout, f"{why}: {describe_runs(layout)}.{describe_rest(bench, layout)}")


def balanced_layout(bench: Workbench) -> Layout:
    """Return a layout in which the free bytes of the used devices are as equal as whole layers allow.

    If the devices cannot hold all layers, each is filled as far as possible, and the other layers are on the CPU.
    """
    ids = bench.in_layer_order(bench.devices)
    best = fill(bench, ids)
    if not bench.holds_all(best):
        return best
    # Bisect the bytes that a filling can leave free on every device: 20 steps tell 24 GiB to 24 KiB.
    low, high = 0, max(bench.usable.values(), default=0)
    for _ in range(_SEARCH_STEPS):
        middle = (low + high) // 2
        layout = fill(bench, ids, headroom_bytes=middle)
        if bench.holds_all(layout):
            best, low = layout, middle
        else:
            high = middle
    spread = None if bench.pinned else capacity_layout(bench, spread=True)
    starts = [best]
    if spread is not None and bench.holds_all(spread):
        starts = [spread] if bench.constraints.split else [best, spread]
    return max((_evened(bench, start) for start in starts), key=lambda layout: _evenness(bench, layout))


def _evenness(bench: Workbench, layout: Layout) -> tuple[int, int]:
    """Return the sort key of a layout, larger is better: (least free bytes of a device, most free bytes negated)."""
    left = _headroom(bench, layout).values()
    # Pins may leave all devices empty.
    return min(left, default=0), -max(left, default=0)


def _evened(bench: Workbench, layout: Layout) -> Layout:
    """Move single layers to a neighbouring device as long as `_evenness` increases, and return the layout."""
    best = _evenness(bench, layout)
    for _ in range(_MOVES):
        tried = [candidate for candidate in _neighbours(bench, layout) if bench.holds_all(candidate)]
        following = max(tried, key=lambda candidate: _evenness(bench, candidate), default=layout)
        found = _evenness(bench, following)
        if found <= best:
            break
        layout, best = following, found
    return layout


def _neighbours(bench: Workbench, layout: Layout) -> Iterator[Layout]:
    for boundary in range(len(layout.runs) - 1):
        first = layout.runs[boundary + 1].first
        for layer, moved in ((first - 1, layout.runs[boundary + 1]), (first, layout.runs[boundary])):
            source = layout.device_of(layer)
            if layer not in bench.pinned and layout.assignment().count(source) > 1:
                yield bench.constraints.with_parts(layout.assign(layer, moved.device))


def _headroom(bench: Workbench, layout: Layout) -> dict[str, int]:
    """Return the bytes that stay free beyond the margin on each device that holds anything, by device id."""
    found = bench.need(layout)
    return {
        device_id: size - found[device_id].need_bytes
        for device_id, size in bench.usable.items()
        if found[device_id].need_bytes
    }
