"""Time of a drag to a place that was not seen before, for every model of `tests/zoo` on eight devices.

    python -m benchmarks.drag_time [NAME ...] [--worst 10]

Every boundary between neighbours is dragged over all places, one after the other: over eight cards, over the CPU and
seven cards, and over eight cards with all experts on the CPU. Each model and each of these begins with new tables,
and with those of the one before cleared away. `--bands FOLDER` measures one more model instead: 60 layers with 256
experts, whose header is written to FOLDER. The expert bands of its first 1 to 60 layers are dragged over all lanes.
Times are seconds of the thread, so that other work beside counts little; `unit` is what making and hashing 10,000
small tuples takes in the same run, which tells slow machines from slow code. `gui_steps_under_goal`: the part of steps
that kept the GUI thread less than the goal, where those that `Pace` has computed beside it did not keep it at all; the
first of a model always is. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from app.models.forecaster import Pace
from benchmarks.plan_time import EXPERTS
from engine.base.units import GIB
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, Override, Run
from engine.planning.layout.parts import place_part
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import PreviewTables, make_preview
from engine.planning.settings.context_settings import ContextSettings
from tests.support.models import write_header_only
from tests.support.truth import MODEL_NAMES, truth_model

DEVICES = 8
GOAL_MS = 8.0
GOAL_FIRST_MS = 50.0


def drags(n_layers: int, ids: Sequence[str], overrides: tuple[Override, ...]) -> Iterator[Layout]:
    """Yield an even layout over `ids`, and those of a drag of each boundary over all places between its neighbours."""
    n_devices = min(len(ids), n_layers)
    even = [n_layers * place // n_devices for place in range(n_devices + 1)]
    cut = partial(_cut, ids, overrides)
    yield cut(even)
    for place in range(1, n_devices):
        for moved in range(even[place - 1] + 1, even[place + 1]):
            if moved != even[place]:
                yield cut([*even[:place], moved, *even[place + 1 :]])


def _cut(ids: Sequence[str], overrides: tuple[Override, ...], cuts: list[int]) -> Layout:
    runs = tuple(Run(ids[place], first, end - 1) for place, (first, end) in enumerate(pairwise(cuts)))
    return Layout(cuts[-1], runs, runs[-1].device, overrides=overrides)


def band_drags(n_layers: int, ids: Sequence[str]) -> Iterator[Layout]:
    """Yield an even layout over `ids`, and those of a drag of the expert bands of its first layers over all lanes."""
    even = next(drags(n_layers, ids, ()))
    yield even
    for last in range(n_layers):
        for device in (*ids, CPU_ID):
            yield place_part(even, "experts", 0, last, device)


def has_experts(model: ModelFile) -> bool:
    """Return whether any layer of the model has experts."""
    return any(block.expert_bytes for block in model.blocks)


def kept_milliseconds(rig: Rig, edits: Sequence[Edit], times_ms: Sequence[float]) -> list[float]:
    """Return how long each step but the first kept the GUI thread: 0 for those beside it."""
    pace, kept_ms = Pace(), []
    for edit, time_ms in zip(edits, times_ms, strict=True):
        kept_ms.append(time_ms if pace.is_quick(rig, edit) else 0.0)
        pace.note(rig, edit, time_ms / 1000)
    return kept_ms[1:]


def milliseconds(layout: Layout, tables: PreviewTables, rig: Rig, context: ContextSettings) -> float:
    """Return how long one step of a drag takes."""
    begun = time.thread_time()
    make_preview(tables, Plan(tables.memory, rig, Edit(layout, context)))
    return (time.thread_time() - begun) * 1000


def unit_milliseconds() -> float:
    """Return what a fixed piece of work in Python takes, the least of five tries."""

    def once() -> float:
        begun = time.thread_time()
        table = {(number, number // 7, "name"): number for number in range(10_000)}
        assert len(table) == 10_000
        return (time.thread_time() - begun) * 1000

    return min(once() for _ in range(5))


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return the value that `part` of the sorted values do not exceed."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def models_of(names: Sequence[str], bands: Path | None) -> Iterator[tuple[str, ModelFile]]:
    """Yield the models to measure with their names: those of the zoo, or one with 256 experts written to `bands`."""
    if bands is not None:
        path = bands / "bands.gguf"
        write_header_only(path, n_layers=60, n_embd=5120, n_head=64, n_ff=1536, n_expert=256, n_expert_used=8)
        yield "256 experts", read_model(path)
        return
    for name in names or MODEL_NAMES:
        yield name, truth_model(name)


def setups_of(model: ModelFile, ids: Sequence[str], *, bands: bool) -> dict[str, list[Layout]]:
    """Return the layouts of the drags of a model, by the words that describe the drag."""
    if bands:
        return {", bands": list(band_drags(model.n_layers, ids))}
    setups = {
        "": list(drags(model.n_layers, ids, ())),
        ", CPU first": list(drags(model.n_layers, (CPU_ID, *ids[1:]), ())),
    }
    if has_experts(model):
        setups[", experts on the CPU"] = list(drags(model.n_layers, ids, (EXPERTS,)))
    return setups


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="models of the zoo; all if none is named")
    parser.add_argument("--bands", type=Path, metavar="FOLDER", help="drag expert bands of a model with 256 experts")
    parser.add_argument("--worst", type=int, default=10, help="how many of the slowest are listed")
    options = parser.parse_args()
    cards = tuple(Device(f"G{place}", f"card {place}", "CUDA", "gpu", 48 * GIB) for place in range(DEVICES))
    rig = Rig(cards, make_host("host", 512 * GIB))
    ids = [device.id for device in cards]
    context = ContextSettings(n_ctx=32768)
    unit_ms = unit_milliseconds()
    firsts: list[tuple[float, str]] = []
    steps: list[tuple[float, str]] = []
    slowest: list[tuple[float, float, str]] = []
    kept: list[float] = []
    for name, model in models_of(options.names, options.bands):
        for what, layouts in setups_of(model, ids, bands=options.bands is not None).items():
            gc.collect()
            tables = PreviewTables(model)
            all_ms = [milliseconds(layout, tables, rig, context) for layout in layouts]
            first, *others = all_ms
            kept += kept_milliseconds(rig, [Edit(layout, context) for layout in layouts], all_ms)
            firsts.append((first, name + what))
            steps += [(each, name + what) for each in others]
            if others:
                slowest.append((quantile(sorted(others), 0.99), max(others), name + what))
    times = sorted(each for each, _ in steps)
    first_times = sorted(each for each, _ in firsts)
    result = {
        "benchmark": "drag_time",
        "steps": len(times),
        "unit_ms": round(unit_ms, 3),
        "step_ms": {str(part): round(quantile(times, part), 3) for part in (0.5, 0.9, 0.99, 0.999, 1.0)},
        "steps_under_goal": round(sum(each < GOAL_MS for each in times) / max(1, len(times)), 5),
        "gui_steps_under_goal": round(sum(each < GOAL_MS for each in kept) / max(1, len(kept)), 5),
        "gui_steps_beside": round(sum(each == 0 for each in kept) / max(1, len(kept)), 5),
        "first_ms": {str(part): round(quantile(first_times, part), 2) for part in (0.5, 0.9, 0.99, 1.0)},
        "firsts_over_goal": sum(each >= GOAL_FIRST_MS for each in first_times),
        "step_99_percent_per_unit": round(quantile(times, 0.99) / unit_ms, 2),
    }
    for worst_99, worst, name in sorted(slowest, reverse=True)[: options.worst]:
        print(f"{name}: 99 % under {worst_99:.1f} ms, slowest {worst:.1f} ms")
    for each, name in sorted(firsts, reverse=True)[: options.worst]:
        print(f"{name}: first {each:.1f} ms")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
