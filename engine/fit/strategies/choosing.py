"""Which candidate is taken: one that holds everything, else one that leaves least on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine.fit.strategies.constraints import AutoLayout
from engine.fit.strategies.expert_filling import fill_with_experts, fill_with_experts_apart
from engine.fit.strategies.filling import plain_fillings, whole_layouts
from engine.fit.strategies.splitting import split_over_devices
from engine.fit.strategies.wording import describe_rest, describe_runs, name_list
from engine.fit.strategies.workbench import Workbench
from engine.language import tr
from engine.layout.layout import Layout
from engine.units import format_bytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout and the reason for it, without a verdict."""

    layout: Layout
    reason: str


def fits_plainly(bench: Workbench) -> bool:
    """Return whether some plain filling fits; then `choose` finds a layout that does."""
    return any(True for _ in whole_layouts(bench)) or any(bench.report(each).fits for each in plain_fillings(bench))


def choose(bench: Workbench, candidates: Iterable[Candidate], *, plain: bool = False) -> AutoLayout:
    """Return the first candidate that fits and leaves no more on the CPU than any filling does; `plain`: than any
    without overrides. Where a split was asked for it is one, if that fits."""
    return split_over_devices(bench, _best(bench, candidates, plain=plain))


def _best(bench: Workbench, candidates: Iterable[Candidate], *, plain: bool) -> AutoLayout:
    listed: list[Candidate] = []
    for candidate in candidates:
        listed.append(candidate)
        if bench.holds_all(candidate.layout) and bench.report(candidate.layout).fits:
            return AutoLayout(candidate.layout, bench.context, candidate.reason, fits=True)
    fillings = [*_plain_fillings(bench), *(() if plain else _fillings_with_experts(bench))]
    fitting = [each for each in fillings if bench.report(each.layout).fits]
    fitting.sort(key=lambda each: -bench.placed_bytes(each.layout))
    floor_bytes = bench.placed_bytes(fitting[0].layout) if fitting else 0
    for candidate in (*listed, *fitting):
        if bench.placed_bytes(candidate.layout) >= floor_bytes and bench.report(candidate.layout).fits:
            return AutoLayout(candidate.layout, bench.context, candidate.reason, fits=True)
    best = min((*listed, *fillings), key=lambda each: _missing_bytes(bench, each.layout))
    return AutoLayout(best.layout, bench.context, f"{best.reason} {_why_not(bench, best.layout)}", fits=False)


def _plain_fillings(bench: Workbench) -> Iterator[Candidate]:
    for layout in plain_fillings(bench):
        reason = tr("Filling devices one after the other from the last layer leaves least on the CPU here: ")
        yield Candidate(layout, f"{reason}{describe_runs(layout)}.{describe_rest(bench, layout)}")


def _fillings_with_experts(bench: Workbench) -> Iterator[Candidate]:
    ids = bench.in_layer_order(bench.devices)
    fillings = [fill_with_experts(bench, order) for order in (ids, ids[::-1])]
    for sparse in dict.fromkeys((*fillings, fill_with_experts_apart(bench, ids))):
        if sparse is not None:
            reason = tr("Filling devices with dense parts first and then with experts leaves least on the CPU here: ")
            yield Candidate(sparse, f"{reason}{describe_runs(sparse)}.{describe_rest(bench, sparse)}")


def _missing_bytes(bench: Workbench, layout: Layout) -> tuple[bool, int]:
    report = bench.report(layout)
    short = sum(max(0, row.shortfall_bytes) for row in report.rows if row.need_bytes)
    return bool(report.violations), short


def _why_not(bench: Workbench, layout: Layout) -> str:
    report = bench.report(layout)
    if report.violations:
        return tr("It cannot be loaded: {message}", message=report.violations[0].message)
    short = [row for row in report.rows if row.is_short]
    missing = name_list(
        [tr("{id} is short by {shortfall}", id=row.id, shortfall=format_bytes(row.shortfall_bytes)) for row in short]
    )
    return tr("It does not fit: {missing}.", missing=missing)
