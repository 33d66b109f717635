"""The way of a token through a layout: members of split layers, what overrides take elsewhere, and hops in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.devices.device import CPU_ID
from engine.layout.layout import Layout, Run
from engine.speed.known_cards import SOURCES, Source
from engine.speed.work import Moved, Work

_HOPS_PER_LAYER = 2
"""In modes tensor and row the members put their parts together behind attention and behind feed-forward."""
_MOVED_OPS = 6
"""Computations of what an override takes from a layer."""
_SMALL_SHARE = 0.02
"""A device with less of a token's time than this does not make the whole less sure."""


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """What a token costs on one device, in seconds, its link included, and where its speed is from."""

    id: str
    seconds: float
    link_s: float
    source: Source


class Timed:
    """What is said of any forecast of a token's time, whose fields the two are."""

    __slots__ = ()
    token_s: float
    source: Source

    @property
    def tokens_per_second(self) -> float:
        return 1 / max(self.token_s, 1e-9)

    @property
    def is_known(self) -> bool:
        """Whether it rests on more than what is usual for devices of a kind."""
        return self.source != "guess"


def least_sure(times: Sequence[DeviceTime], token_s: float) -> Source:
    """Return the least sure source of devices that count."""
    weighty = [each.source for each in times if each.seconds >= _SMALL_SHARE * token_s]
    return max(weighty, key=SOURCES.index, default="guess")


def whole_s(layout: Layout, seconds: Mapping[str, float]) -> float:
    """Return the time of a token: members of a split layer work at the same time, all others one after another."""
    members = {device_id for device_id, _ in shares(layout)}
    together = max((each for key, each in seconds.items() if key in members), default=0.0)
    return together + sum(each for key, each in seconds.items() if key not in members)


def shares(layout: Layout) -> tuple[tuple[str, float], ...]:
    """Return the members of modes tensor and row with their parts of a layer; none in other modes."""
    if layout.split_mode not in ("tensor", "row"):
        return ()
    total = sum(share for _, share in layout.tensor_split)
    return tuple((key, share / total) for key, share in layout.tensor_split if share > 0) if total > 0 else ()


def moves(layout: Layout, work: Work) -> Iterator[tuple[Run, Moved]]:
    """Yield each run with what overrides take from it to another device."""
    for moved in work.moved(layout):
        for run in layout.runs:
            if run.device != moved.device and moved.count(run.first, run.last):
                yield run, moved


def hops(layout: Layout, work: Work) -> Iterator[tuple[str, float, int]]:
    """Yield a device, bytes, and how often as many of a token cross its link; the CPU has none."""
    size = work.hop_bytes
    members = shares(layout)
    if members:
        split = [run for run in layout.runs if run.device != CPU_ID]
        count = _HOPS_PER_LAYER * sum(run.length for run in split)
        for device_id, _ in members:
            yield device_id, size, count
    runs = () if members else layout.runs
    route = [CPU_ID, *(run.device for run in runs), layout.output_device]
    crossings = [pair for pair in pairwise(route) if pair[0] != pair[1]]
    for pair in crossings:
        yield from ((device_id, size, 1) for device_id in pair if device_id != CPU_ID)
    for run, moved in moves(layout, work):
        times = 2 * moved.count(run.first, run.last)
        yield from ((device_id, size, times) for device_id in (run.device, moved.device) if device_id != CPU_ID)


def described_ops(layout: Layout, work: Work) -> Mapping[str, float]:
    """Return by device the computations that an RPC worker is told anew for each token.

    A worker knows the last graph that it was sent (`last_graph_uid` in ggml-rpc): one that has a single part of the
    model is told to do the same again, one that has several is sent the graph of each, every time.
    """
    found: dict[str, float] = {}
    if shares(layout):
        return found
    route = [*(run.device for run in layout.runs), layout.output_device]
    parts = Counter(here for before, here in pairwise([CPU_ID, *route]) if here != before)
    cut = {run.device for run, _ in moves(layout, work)}
    for run in layout.runs:
        if parts[run.device] > 1 or run.device in cut:
            found[run.device] = found.get(run.device, 0.0) + work.ops(run.first, run.last)
    for run, moved in moves(layout, work):
        count = _MOVED_OPS * moved.count(run.first, run.last)
        found[moved.device] = found.get(moved.device, 0.0) + count
    return found
