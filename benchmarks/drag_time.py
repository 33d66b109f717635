"""Time of each step of a drag in the layout editor, for every model of `tests/zoo` on eight cards.

    python -m benchmarks.drag_time [NAME ...] [--worst 10]

A step makes the preview of a layout that was not previewed before. Each boundary between two runs is dragged over all
positions between its neighbours: over eight cards, over the CPU and seven cards, and over eight cards with all experts
on the CPU. Each such drag begins without cached tables.

`--bands FOLDER` measures instead a model of 60 layers with 256 experts, whose header is written to FOLDER. The expert
bands of its first 1 to 60 layers are dragged over all lanes.

Times are milliseconds of the thread's processor time, which other load on the machine changes little:

`step_ms`, `steps_under_goal`: quantiles of all steps but the first of a drag, and the share below the goal of 8 ms.
`gui_steps_under_goal`: the same share if steps that `Pace` computes outside the GUI thread count as 0 ms.
`gui_steps_beside`: share of the steps that `Pace` computes outside the GUI thread.
`first_ms`, `firsts_over_goal`: quantiles of the first steps, and the number of those over their goal of 50 ms.
`unit_ms`: making and hashing 10,000 small tuples in the same run, to compare machines of different speed.
`step_99_percent_per_unit`: the 99 % quantile of the steps, divided by `unit_ms`.

The `--worst` slowest models are printed by name. The last line is one JSON object.
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
from engine.planning.plan.preview import PreviewCache, make_preview
from engine.planning.settings.context_settings import ContextSettings
from tests.support.models import write_header_only
from tests.support.truth import MODEL_NAMES, truth_model

DEVICES = 8
GOAL_MS = 8.0
GOAL_FIRST_MS = 50.0


def drags(n_layers: int, ids: Sequence[str], overrides: tuple[Override, ...]) -> Iterator[Layout]:
    """Yield an even layout over `ids`, then each boundary moved to each position between its neighbours."""
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
    """Yield an even layout over `ids`, then the layouts of a drag of the expert band over all lanes.

    The band is that of the first layer, then of the first two, and so on up to all layers.
    """
    even = next(drags(n_layers, ids, ()))
    yield even
    for last in range(n_layers):
        for device in (*ids, CPU_ID):
            yield place_part(even, "experts", 0, last, device)


def has_experts(model: ModelFile) -> bool:
    """Return whether any layer of the model has experts."""
    return any(block.expert_bytes for block in model.blocks)


def kept_milliseconds(rig: Rig, edits: Sequence[Edit], times_ms: Sequence[float]) -> list[float]:
    """Return the milliseconds for which each step after the first blocked the GUI thread.

    They are 0 if `Pace` has the step computed in another thread.
    """
    pace, kept_ms = Pace(), []
    for edit, time_ms in zip(edits, times_ms, strict=True):
        kept_ms.append(time_ms if pace.is_quick(rig, edit) else 0.0)
        pace.note(rig, edit, time_ms / 1000)
    return kept_ms[1:]


def milliseconds(layout: Layout, tables: PreviewCache, rig: Rig, context: ContextSettings) -> float:
    """Return the processor time of one step of a drag, in milliseconds."""
    begun = time.thread_time()
    make_preview(tables, Plan(tables.memory, rig, Edit(layout, context)))
    return (time.thread_time() - begun) * 1000


def unit_milliseconds() -> float:
    """Return the processor time of a fixed piece of Python work, in milliseconds: the least of five runs."""

    def once() -> float:
        begun = time.thread_time()
        table = {(number, number // 7, "name"): number for number in range(10_000)}
        assert len(table) == 10_000
        return (time.thread_time() - begun) * 1000

    return min(once() for _ in range(5))


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return the quantile `part` (0 to 1) of sorted values."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def models_of(names: Sequence[str], bands: Path | None) -> Iterator[tuple[str, ModelFile]]:
    """Yield the models to be measured, with their names: those of the zoo (all if `names` is empty).

    If `bands` is a folder, only a model with 256 experts is yielded, whose header is written there.
    """
    if bands is not None:
        path = bands / "bands.gguf"
        write_header_only(path, n_layers=60, n_embd=5120, n_head=64, n_ff=1536, n_expert=256, n_expert_used=8)
        yield "256 experts", read_model(path)
        return
    for name in names or MODEL_NAMES:
        yield name, truth_model(name)


def setups_of(model: ModelFile, ids: Sequence[str], *, bands: bool) -> dict[str, list[Layout]]:
    """Return the layouts of each drag of a model. Keys are suffixes of the model's name in the output."""
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
    gc.disable()
    unit_ms = unit_milliseconds()
    firsts: list[tuple[float, str]] = []
    steps: list[tuple[float, str]] = []
    slowest: list[tuple[float, float, str]] = []
    kept: list[float] = []
    for name, model in models_of(options.names, options.bands):
        for what, layouts in setups_of(model, ids, bands=options.bands is not None).items():
            # As in the window, which collects garbage between events only (`app.garbage`).
            gc.collect()
            tables = PreviewCache(model)
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
