"""Words of explanations."""

from __future__ import annotations

from collections.abc import Sequence

from engine.devices.device import CPU_ID
from engine.fit.strategies.workbench import Workbench
from engine.language import tr, tr_count
from engine.layout.layout import Layout, layer_words


def name_list(names: Sequence[str]) -> str:
    """Return "A", "A and B" or "A, B and C"."""
    return (
        names[0]
        if len(names) == 1
        else tr("{names} and {names2}", names=", ".join(names[:-1]), names2=names[-1])
        if names
        else tr("no device")
    )


def count_layers(count: int) -> str:
    """Return "1 layer" or "5 layers"."""
    return tr_count("{count} layer", "{count} layers", count)


def describe_runs(layout: Layout) -> str:
    """Return what each device holds, in layer order."""
    parts = [
        tr("{layer} on {device}", layer=layer_words(run.first, run.last), device=run.device) for run in layout.runs
    ]
    if layout.output_device != layout.runs[-1].device:
        parts.append(tr("the output layer on {output_device}", output_device=layout.output_device))
    return ", ".join(parts)


def all_on_cpu(bench: Workbench) -> str:
    """Return why no device but the CPU holds anything."""
    layers = tr("all {count_layers}", count_layers=count_layers(bench.n_layers))
    ids = {device.id for device in bench.rig.devices}
    if not ids:
        return tr("There is no device but the CPU, which holds {layers}.", layers=layers)
    if ids <= bench.constraints.off:
        return tr("Every device is switched off, so {layers} stay on the CPU.", layers=layers)
    if len(bench.pinned) == bench.n_layers:
        return tr("Layers are pinned to the CPU: {layers}.", layers=layers)
    return tr("No device has room for even one layer, so {layers} stay on the CPU.", layers=layers)


def describe_rest(bench: Workbench, layout: Layout) -> str:
    """Return a sentence on what the CPU keeps although it is not pinned there, empty if that is nothing."""
    pinned_here = {index for index, device_id in bench.pinned.items() if device_id == CPU_ID}
    kept = sum(device_id == CPU_ID and index not in pinned_here for index, device_id in enumerate(layout.assignment()))
    parts = [count_layers(kept)] if kept else []
    if layout.output_device == CPU_ID and bench.output != CPU_ID and layout.n_layers - 1 not in pinned_here:
        parts.append(tr("the output layer"))
    moved = {index for each in layout.overrides if each.device == CPU_ID for index in each.layers or ()}
    if moved:
        parts.append(tr("experts of {count_layers}", count_layers=count_layers(len(moved))))
    why = tr("that no device takes beside what is pinned") if bench.pinned else tr("that no device has room for")
    return tr(" The CPU keeps {name_list} {why}.", name_list=name_list(parts), why=why) if parts else ""
