"""Words of explanations."""

from __future__ import annotations

from collections.abc import Sequence

from engine.devices.device import CPU_ID
from engine.layout.layout import Layout


def name_list(names: Sequence[str]) -> str:
    """Return "A", "A and B" or "A, B and C"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "no device"


def count_layers(count: int) -> str:
    """Return "1 layer" or "5 layers"."""
    return f"{count} layer{'' if count == 1 else 's'}"


def describe_runs(layout: Layout) -> str:
    """Return what each device holds, in layer order."""
    parts = [f"{_range(run.first, run.last)} on {run.device}" for run in layout.runs]
    if layout.output_device != layout.runs[-1].device:
        parts.append(f"the output layer on {layout.output_device}")
    return ", ".join(parts)


def describe_rest(layout: Layout) -> str:
    """Return a sentence on what the CPU keeps, empty if that is nothing."""
    kept = layout.assignment().count(CPU_ID)
    parts = [count_layers(kept)] if kept else []
    if layout.output_device == CPU_ID:
        parts.append("the output layer")
    moved = {index for each in layout.overrides if each.device == CPU_ID for index in each.layers or ()}
    if moved:
        parts.append(f"experts of {count_layers(len(moved))}")
    return f" The CPU keeps {name_list(parts)} that no device has room for." if parts else ""


def _range(first: int, last: int) -> str:
    return f"layer {first}" if first == last else f"layers {first}-{last}"
