"""Strategy "experts": dense weights and KV cache go to devices first, then as many experts as fit."""

from __future__ import annotations

from collections.abc import Iterator

from engine.base.language import tr
from engine.devices.device import CPU_ID
from engine.planning.fit.strategies.choosing import Candidate, count_layers, describe_runs
from engine.planning.fit.strategies.expert_filling import fill_with_experts
from engine.planning.fit.strategies.fewest import fewest_candidates
from engine.planning.fit.strategies.workbench import Workbench, moved_tensors
from engine.planning.layout.layout import Layout


def experts_candidates(bench: Workbench) -> Iterator[Candidate]:
    """Yield layouts with nothing on the CPU; if there are none, the layout with some of the experts on the CPU."""
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
    assignment = layout.assignment()
    away = {index for index, _, _ in moved_tensors(bench.memory.model, layout)}
    on_devices = sum(device != CPU_ID for device in assignment)
    if not on_devices:
        return tr(
            "No device has room for the dense part of a layer, so all {count_layers} stay on the CPU.",
            count_layers=count_layers(bench.n_layers),
        )
    shares = []
    for device_id in dict.fromkeys(device for device in assignment if device != CPU_ID):
        own = [
            index for index, device in enumerate(assignment) if device == device_id and bench.layers[index].expert_bytes
        ]
        kept = sum(index not in away for index in own)
        shares.append(
            tr("{n_on_device} of {count} layers on {device}", n_on_device=kept, count=len(own), device=device_id)
        )
    return tr(
        "Dense weights, attention and KV cache are placed as follows: {runs}. {count} layers have experts. All "
        "experts are on the CPU, except those of {shares}.",
        runs=describe_runs(layout),
        count=n_with_experts,
        shares=", ".join(shares),
    )
