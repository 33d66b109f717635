"""Words of explanations."""

from __future__ import annotations

from collections.abc import Sequence

from engine.devices.device import CPU_ID
from engine.fit.strategies.workbench import Workbench
from engine.layout.layout import Layout
from engine.layout.range_words import layer_words


def name_list(names: Sequence[str]) -> str:
    """Return "A", "A and B" or "A, B and C"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "no device"


def count_layers(count: int) -> str:
    """Return "1 layer" or "5 layers"."""
    return f"{count} layer{'' if count == 1 else 's'}"


def describe_runs(layout: Layout) -> str:
    """Return what each device holds, in layer order."""
    parts = [f"{layer_words(run.first, run.last)} on {run.device}" for run in layout.runs]
    if layout.output_device != layout.runs[-1].device:
        parts.append(f"the output layer on {layout.output_device}")
    return ", ".join(parts)


def all_on_cpu(bench: Workbench) -> str:
    """Return why no device but the CPU holds anything."""
    layers = f"all {count_layers(bench.n_layers)}"
    ids = {device.id for device in bench.rig.devices}
    if not ids:
        return f"There is no device but the CPU, which holds {layers}."
    if ids <= bench.constraints.off:
        return f"Every device is switched off, so {layers} stay on the CPU."
    if len(bench.pinned) == bench.n_layers:
        return f"Layers are pinned to the CPU: {layers}."
    return f"No device has room for even one layer, so {layers} stay on the CPU."


def describe_rest(bench: Workbench, layout: Layout) -> str:
    """Return a sentence on what the CPU keeps although it is not pinned there, empty if that is nothing."""
    pinned_here = {index for index, device_id in bench.pinned.items() if device_id == CPU_ID}
    kept = sum(device_id == CPU_ID and index not in pinned_here for index, device_id in enumerate(layout.assignment()))
    parts = [count_layers(kept)] if kept else []
    if layout.output_device == CPU_ID and bench.output != CPU_ID and layout.n_layers - 1 not in pinned_here:
        parts.append("the output layer")
    moved = {index for each in layout.overrides if each.device == CPU_ID for index in each.layers or ()}
    if moved:
        parts.append(f"experts of {count_layers(len(moved))}")
    why = "that no device takes beside what is pinned" if bench.pinned else "that no device has room for"
    return f" The CPU keeps {name_list(parts)} {why}." if parts else ""
