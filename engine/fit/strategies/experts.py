"""Strategy experts: attention, KV cache and dense parts on devices first, experts as far as each device has room."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate

from engine.devices.device import CPU_ID, Rig
from engine.fit.strategies.constraints import NO_CONSTRAINTS, AutoLayout, Constraints
from engine.fit.strategies.fewest import fewest_candidates
from engine.fit.strategies.proportional import proportional_counts
from engine.fit.strategies.wording import count_layers, describe_runs
from engine.fit.strategies.workbench import Candidate, Workbench, largest, moved_tensors
from engine.gguf.blocks import part_of_tensor
from engine.layout.context_settings import ContextSettings
from engine.layout.layout import Layout, Override
from engine.memory.model_memory import ModelMemory


def experts(
    memory: ModelMemory, rig: Rig, context: ContextSettings, constraints: Constraints = NO_CONSTRAINTS
) -> AutoLayout:
    """Return the layout that keeps experts on the CPU only where their device has no room for them."""
    bench = Workbench(memory, rig, context, constraints)
    return bench.choose(experts_candidates(bench))


def experts_candidates(bench: Workbench) -> Iterator[Candidate]:
    """Yield what holds everything if anything does, else layers on devices with some experts on the CPU."""
    whole = list(fewest_candidates(bench))
    with_experts = [layer.index for layer in bench.layers if layer.expert_bytes]
    if not with_experts:
        for candidate in whole:
            yield Candidate(candidate.layout, f"The model has no experts. {candidate.reason}")
        return
    if any(bench.holds_all(candidate.layout) for candidate in whole):
        for candidate in whole:
            yield Candidate(candidate.layout, f"No experts need to go to the CPU. {candidate.reason}")
        return
    found = [_with_parts(bench, _with_experts(bench, base)) for base in _bases(bench, with_experts)]
    found.sort(key=lambda layout: -bench.placed_bytes(layout))
    for layout in found:
        yield Candidate(layout, _reason(bench, layout, len(with_experts)))


def _bases(bench: Workbench, with_experts: Iterable[int]) -> Iterator[Layout]:
    """Yield layouts with all experts on the CPU: ranges in proportion to room if they go, else devices filled."""
    overrides = _overrides(bench, with_experts)
    ids = bench.in_layer_order(bench.devices)
    if ids:
        sizes = [layer.weights_bytes + layer.kv_bytes for layer in bench.layers]
        counts = proportional_counts(
            sizes, [bench.usable[device_id] for device_id in ids], bench.output_bytes, len(ids) - 1
        )
        places = [device_id for device_id, count in zip(ids, counts, strict=True) for _ in range(count)]
        shared = bench.layout(places, overrides=overrides)
        if not bench.shortfalls(shared):
            yield shared
            return
    yield bench.fill(ids, overrides=overrides)


def _overrides(bench: Workbench, layers: Iterable[int]) -> list[Override]:
    """Return the overrides that keep the experts of `layers` on the CPU; pinned layers keep theirs.

    Ranges go over layers between them that have no experts.
    """
    wanted = {index for index in layers if index not in bench.pinned}
    ranges: list[tuple[int, int]] = []
    for index in sorted(wanted):
        between = range(ranges[-1][1] + 1, index) if ranges else range(0)
        if ranges and not any(bench.layers[each].expert_bytes for each in between):
            ranges[-1] = (ranges[-1][0], index)
        else:
            ranges.append((index, index))
    return [Override(CPU_ID, part="experts", first=first, last=last) for first, last in ranges]


def _with_experts(bench: Workbench, base: Layout) -> Layout:
    """Give every device the experts of its own last layers, as many as fit, then any further ones that still do."""
    places = base.assignment()
    away = {index for each in base.overrides for index in each.layers or () if places[index] != CPU_ID}

    def layout_with(kept_away: set[int]) -> Layout:
        return bench.layout(places, base.output_device, _overrides(bench, kept_away))

    def goes(before: set[int], own: list[int], count: int) -> bool:
        return not bench.shortfalls(layout_with(before - set(own[len(own) - count :])))

    for device_id in dict.fromkeys(places):
        own = [index for index in range(bench.n_layers) if index in away and places[index] == device_id]
        room = bench.usable.get(device_id, 0) - bench.need(layout_with(away))[device_id].need_bytes
        sums = accumulate(bench.layers[index].expert_bytes for index in reversed(own))
        count = largest(
            len(own),
            partial(goes, away, own),
            sum(size <= room for size in sums),
        )
        away -= set(own[len(own) - count :])
    too_large: dict[str, int] = {}
    for index in sorted(away, key=lambda each: -bench.layers[each].expert_bytes):
        size = bench.layers[index].expert_bytes
        if size >= too_large.get(places[index], size + 1):
            continue
        if bench.shortfalls(layout_with(away - {index})):
            too_large[places[index]] = size
        else:
            away.discard(index)
    return layout_with(away)


def _with_parts(bench: Workbench, layout: Layout) -> Layout:
    """Bring single matrices of experts back to each device: those of one more layer, which are less than all of it."""
    places = layout.assignment()
    for device_id in dict.fromkeys(place for place in places if place != CPU_ID):
        away = [index for each in layout.overrides for index in each.layers or () if places[index] == device_id]
        if not away:
            continue
        tensors = bench.memory.model.blocks[max(away)].tensors
        stems = sorted(
            {tensor.name.rsplit(".", 1)[0] for tensor in tensors if part_of_tensor(tensor.name) == "experts"}
        )
        for n_away in range(1, len(stems)):
            tried = _split_layer(layout, max(away), stems[-n_away:])
            if not bench.shortfalls(tried):
                layout = tried
                break
    return layout


def _split_layer(layout: Layout, index: int, stems: list[str]) -> Layout:
    """Return the layout with only the tensors of `stems` away in layer `index`."""
    names = "|".join(re.escape(stem) for stem in stems)
    rest: list[Override] = [Override(CPU_ID, pattern=rf"^({names})\.")]
    for each in layout.overrides:
        layers = each.layers
        if layers is None or index not in layers:
            rest.append(each)
            continue
        parts = ((layers[0], index - 1), (index + 1, layers[-1]))
        rest += [replace(each, first=first, last=last) for first, last in parts if first <= last]
    return replace(layout, overrides=tuple(rest))


def _reason(bench: Workbench, layout: Layout, n_with_experts: int) -> str:
    places = layout.assignment()
    away = {index for index, _, _ in moved_tensors(bench.memory.model, layout)}
    on_devices = sum(place != CPU_ID for place in places)
    if not on_devices:
        return (
            f"No device has room for the dense part of a layer, so all {count_layers(bench.n_layers)} stay on the CPU."
        )
    shares = []
    for device_id in dict.fromkeys(place for place in places if place != CPU_ID):
        own = [index for index, place in enumerate(places) if place == device_id and bench.layers[index].expert_bytes]
        kept = sum(index not in away for index in own)
        shares.append(f"{device_id} those of {kept} of its {len(own)}")
    return (
        f"Dense parts, attention and KV cache come first ({describe_runs(layout)}); of the {n_with_experts} layers' "
        f"experts the devices hold what they have room for, {', '.join(shares)}, and the CPU the others."
    )
