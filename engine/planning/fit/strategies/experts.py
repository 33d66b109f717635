"""Strategy experts: attention, KV cache and dense parts on devices first, experts as far as each device has room."""

from __future__ import annotations

from collections.abc import Iterator

from engine.base.language import tr
from engine.devices.device import CPU_ID, Rig
from engine.planning.fit.strategies.choosing import Candidate, choose, count_layers, describe_runs
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, AutoLayout, Constraints
from engine.planning.fit.strategies.expert_filling import fill_with_experts
from engine.planning.fit.strategies.fewest import fewest_candidates
from engine.planning.fit.strategies.workbench import Workbench, moved_tensors
from engine.planning.layout.layout import Layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings


def experts(
    memory: ModelMemory, rig: Rig, context: ContextSettings, constraints: Constraints = NO_CONSTRAINTS
) -> AutoLayout:
    """Return the layout that keeps experts on the CPU only where their device has no room for them."""
    bench = Workbench(memory, rig, context, constraints)
    return choose(bench, experts_candidates(bench))


def experts_candidates(bench: Workbench) -> Iterator[Candidate]:
    """Yield what holds everything if anything does, else layers on devices with some experts on the CPU."""
    whole = list(fewest_candidates(bench))
    with_experts = [layer.index for layer in bench.layers if layer.expert_bytes]
    if not with_experts:
        for candidate in whole:
            yield Candidate(candidate.layout, tr("The model has no experts. {reason}", reason=candidate.reason))
        return
    if any(bench.holds_all(candidate.layout) for candidate in whole):
        for candidate in whole:
            yield Candidate(candidate.layout, tr("No experts need to go to the CPU. {reason}", reason=candidate.reason))
        return
    layout = fill_with_experts(bench, bench.in_layer_order(bench.devices))
    if layout is not None:
        yield Candidate(layout, _reason(bench, layout, len(with_experts)))


def _reason(bench: Workbench, layout: Layout, n_with_experts: int) -> str:
    places = layout.assignment()
    away = {index for index, _, _ in moved_tensors(bench.memory.model, layout)}
    on_devices = sum(place != CPU_ID for place in places)
    if not on_devices:
        return tr(
            "No device has room for the dense part of a layer, so all {count_layers} stay on the CPU.",
            count_layers=count_layers(bench.n_layers),
        )
    shares = []
    for device_id in dict.fromkeys(place for place in places if place != CPU_ID):
        own = [index for index, place in enumerate(places) if place == device_id and bench.layers[index].expert_bytes]
        kept = sum(index not in away for index in own)
        shares.append(tr("{device_id} those of {kept} of its {count}", device_id=device_id, kept=kept, count=len(own)))
    return tr(
        "Dense parts, attention and KV cache come first ({describe_runs}); of the "
        "{n_with_experts} layers' experts the devices hold what they have room for, {names}, and "
        "the CPU the others.",
        describe_runs=describe_runs(layout),
        n_with_experts=n_with_experts,
        names=", ".join(shares),
    )
