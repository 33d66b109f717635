"""Selection of one layout among the candidates of a strategy, with an explanation for the user.

The first candidate that has nothing on the CPU is chosen. If there is none, candidates are compared with fillings,
which put as many layers as fit on one device after another. The first candidate that has at least as many bytes off the
CPU as the best filling is chosen. If the user requested a split and the chosen layout uses one device only, a second
device gets a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct

from engine.base.language import join_names, tr, tr_count
from engine.base.units import format_bytes
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, AutoLayout, Constraints, Strategy
from engine.planning.fit.strategies.expert_filling import fill_with_experts, fill_with_experts_apart
from engine.planning.fit.strategies.filling import plain_fillings, whole_layouts
from engine.planning.fit.strategies.workbench import Workbench
from engine.planning.layout.layout import Layout, layer_text
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings


def name_list(names: Sequence[str]) -> str:
    """Return names as a phrase: "A", "A and B" or "A, B and C"; "no device" if there are none."""
    return join_names(names) or tr("no device")


def count_layers(count: int) -> str:
    """Return a number of layers in the user's language: "1 layer" or "5 layers"."""
    return tr_count("{count} layer", "{count} layers", count)


def describe_runs(layout: Layout) -> str:
    """Return the layers of each device as a phrase, in layer order."""
    parts = [tr("{layer} on {device}", layer=layer_text(run.first, run.last), device=run.device) for run in layout.runs]
    if layout.output_device != layout.runs[-1].device:
        parts.append(tr("the output layer on {output_device}", output_device=layout.output_device))
    return ", ".join(parts)


def all_on_cpu(bench: Workbench) -> str:
    """Return a sentence on why everything is on the CPU."""
    layers = tr("all {count_layers}", count_layers=count_layers(bench.n_layers))
    ids = {device.id for device in bench.rig.devices}
    if not ids:
        return tr("The CPU is the only device, so it holds {layers}.", layers=layers)
    if ids <= bench.constraints.off:
        return tr("Every device is excluded, so {layers} stay on the CPU.", layers=layers)
    if len(bench.pinned) == bench.n_layers:
        return tr("Layers are pinned to the CPU: {layers}.", layers=layers)
    return tr("No device besides the CPU can hold even one layer, so {layers} stay on the CPU.", layers=layers)


def describe_rest(bench: Workbench, layout: Layout) -> str:
    """Return a sentence that says why layers and experts that are not pinned to the CPU are on it; "" if none are."""
    pinned_here = {index for index, device_id in bench.pinned.items() if device_id == CPU_ID}
    kept = sum(device_id == CPU_ID and index not in pinned_here for index, device_id in enumerate(layout.assignment()))
    parts = [count_layers(kept)] if kept else []
    if layout.output_device == CPU_ID and bench.output != CPU_ID and layout.n_layers - 1 not in pinned_here:
        parts.append(tr("the output layer"))
    moved = {index for each in layout.overrides if each.device == CPU_ID for index in each.layers or ()}
    if moved:
        parts.append(tr("experts of {count_layers}", count_layers=count_layers(len(moved))))
    if not parts:
        return ""
    if bench.pinned:
        return tr(
            " The rest is on the CPU ({parts}), because the pinned layers leave no room for more on the other devices.",
            parts=name_list(parts),
        )
    return tr(" The rest is on the CPU ({parts}), because no other device has room for more.", parts=name_list(parts))


def split_over_devices(bench: Workbench, found: AutoLayout) -> AutoLayout:
    """Return `found` with one layer on a second device, if a split was requested and `found` uses one device only.

    If no other device has room for a layer, only the explanation changes.
    """
    used = {*found.layout.devices} - {CPU_ID}
    if not bench.constraints.split or not found.fits or len(used) != 1:
        return found
    for device in bench.devices:
        moved = None if device.id in used else _with_one_layer(bench, found.layout, device.id)
        if moved is not None:
            layout, layer = moved
            why = tr(
                "A split over several devices was requested, so {id} gets layer {layer}.", id=device.id, layer=layer
            )
            return replace(found, layout=layout, explanation=f"{found.explanation} {why}")
    if not any(device.id not in used for device in bench.devices):
        why = tr("A split over several devices was requested, but there is no second device to use.")
    else:
        why = tr("A split over several devices was requested, but no second device has room for a layer.")
    return replace(found, explanation=f"{found.explanation} {why}")


def _with_one_layer(bench: Workbench, layout: Layout, device_id: str) -> tuple[Layout, int] | None:
    """Return `layout` with one layer moved to the device, and the index of this layer; None if no layer fits there.

    Only two layers are tried: the first and the last one that are not on the CPU and not pinned by the user.
    """
    assignment = layout.assignment()
    free = [index for index, device in enumerate(assignment) if device != CPU_ID and index not in bench.pinned]
    for layer in dict.fromkeys((*free[:1], *free[-1:])):
        moved = bench.constraints.with_parts(layout.assign(layer, device_id))
        # A device that gave its only layer away would leave one device again.
        if len({*moved.devices} - {CPU_ID}) > 1 and bench.report(moved).fits:
            return moved, layer
    return None


class Candidate(Struct, frozen=True):
    """A layout that a strategy suggests, with the reason as a sentence. It is not yet known whether it fits."""

    layout: Layout
    reason: str


def fits_plainly(bench: Workbench) -> bool:
    """Return whether a simple layout fits: a single device, or devices filled one after another with whole layers.

    If one fits, `choose` finds a layout that fits.
    """
    return any(True for _ in whole_layouts(bench)) or any(bench.report(each).fits for each in plain_fillings(bench))


def choose(bench: Workbench, candidates: Iterable[Candidate]) -> AutoLayout:
    """Choose one of the candidate layouts, or a filling (devices filled one after another with layers that fit).

    The first candidate that fits is chosen if it places at least as many bytes off the CPU as the best filling. If no
    layout fits, the one that lacks the fewest bytes is returned. If the user requested a split, the layout is split if
    possible.
    """
    return split_over_devices(bench, _best(bench, candidates))


def strategy_of(candidates: Callable[[Workbench], Iterator[Candidate]]) -> Strategy:
    """Return the strategy that chooses among the layouts of `candidates`, which yields the best ones first."""

    def strategy(
        memory: ModelMemory, rig: Rig, context: ContextSettings, constraints: Constraints = NO_CONSTRAINTS
    ) -> AutoLayout:
        bench = Workbench(memory, rig, context, constraints)
        return choose(bench, candidates(bench))

    return strategy


def _best(bench: Workbench, candidates: Iterable[Candidate]) -> AutoLayout:
    listed: list[Candidate] = []
    for candidate in candidates:
        listed.append(candidate)
        # No layout can place more. Candidates are generated on demand, so the remaining ones cost nothing.
        if bench.holds_all(candidate.layout) and bench.report(candidate.layout).fits:
            return AutoLayout(candidate.layout, bench.context, candidate.reason, fits=True)
    fillings = [*_plain_fillings(bench), *_fillings_with_experts(bench)]
    fitting = [each for each in fillings if bench.report(each.layout).fits]
    fitting.sort(key=lambda each: -bench.placed_bytes(each.layout))
    # A candidate has to place at least as much on devices as the best filling. Otherwise the filling is taken.
    floor_bytes = bench.placed_bytes(fitting[0].layout) if fitting else 0
    for candidate in (*listed, *fitting):
        if bench.placed_bytes(candidate.layout) >= floor_bytes and bench.report(candidate.layout).fits:
            return AutoLayout(candidate.layout, bench.context, candidate.reason, fits=True)
    best = min((*listed, *fillings), key=lambda each: _missing_bytes(bench, each.layout))
    return AutoLayout(best.layout, bench.context, f"{best.reason} {_why_not(bench, best.layout)}", fits=False)


def _plain_fillings(bench: Workbench) -> Iterator[Candidate]:
    for layout in plain_fillings(bench):
        reason = tr(
            "Devices are filled from the last layer backwards, which leaves the least on the CPU: {runs}.{rest}",
            runs=describe_runs(layout),
            rest=describe_rest(bench, layout),
        )
        yield Candidate(layout, reason)


def _fillings_with_experts(bench: Workbench) -> Iterator[Candidate]:
    ids = bench.in_layer_order(bench.devices)
    fillings = [fill_with_experts(bench, order) for order in (ids, ids[::-1])]
    for sparse in dict.fromkeys((*fillings, fill_with_experts_apart(bench, ids))):
        if sparse is not None:
            reason = tr(
                "Devices are filled with non-expert weights first, then with experts: {runs}.{rest}",
                runs=describe_runs(sparse),
                rest=describe_rest(bench, sparse),
            )
            yield Candidate(sparse, reason)


def _missing_bytes(bench: Workbench, layout: Layout) -> tuple[bool, int]:
    report = bench.report(layout)
    short = sum(max(0, row.shortfall_bytes) for row in report.rows if row.need_bytes)
    return bool(report.violations), short


def _why_not(bench: Workbench, layout: Layout) -> str:
    report = bench.report(layout)
    if report.violations:
        return tr("This layout cannot be loaded: {message}", message=report.violations[0].message)
    short = [row for row in report.rows if row.is_short]
    missing = name_list(
        [tr("{id} is short by {shortfall}", id=row.id, shortfall=format_bytes(row.shortfall_bytes)) for row in short]
    )
    return tr("This layout does not fit: {missing}.", missing=missing)
