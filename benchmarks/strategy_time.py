"""Processor time of each strategy of automatic layouts, for a model that was just opened.

    python -m benchmarks.strategy_time [STRATEGY ...] [--headers [NAME ...]]

Models are DeepSeek-V3 on eight different cards that hold about half of it, and well-known models of `tests/zoo` on
equal cards. Printed for each strategy: seconds of the thread's processor time, and the number of layouts that it
computed (`tried`). `unit_ms` is a fixed piece of work (`benchmarks.drag_time`), to compare machines of different speed;
`slowest_per_unit` is the slowest strategy for DeepSeek-V3, in these units. The last line is one JSON object.

`--headers` measures instead every recorded header of `tests/zoo`, or those named, on four and on eight different cards
that hold about half of the model, and prints the ten slowest searches.
"""

from __future__ import annotations

import argparse
import json
import time

from app.allocator import rare_full_collections
from benchmarks.drag_time import unit_milliseconds
from engine.base.units import GIB
from engine.devices.device import Device, Rig, make_host
from engine.planning.fit.strategies.catalogue import STRATEGIES, find_strategy
from engine.planning.fit.strategies.constraints import Constraints, SearchLimit
from engine.planning.fit.strategies.fastest import initial_layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from tests.support.truth import MODEL_NAMES, truth_model

CARDS_GIB: dict[str, tuple[int, ...]] = {
    "deepseek-v3": (80, 48, 48, 40, 32, 24, 24, 16),
    "falcon-mamba-7b": (3,) * 6,
    "granite-4.0-h-small": (12,) * 6,
    "qwen3-30b-a3b": (4,) * 6,
    "gemma-2-27b": (6, 6),
}
CONTEXT = ContextSettings(n_ctx=8192)


WORST = 10
SHARES = (1.0, 1.0, 0.75, 0.5)


def measure_headers(names: list[str], strategies: list[str]) -> list[tuple[float, int, str]]:
    """Return (seconds, layouts tried, model with cards and strategy) of each search, the slowest first."""
    found: list[tuple[float, int, str]] = []
    for name in names or MODEL_NAMES:
        model = truth_model(name)
        weights_bytes = sum(tensor.size_bytes for block in model.blocks for tensor in block.tensors)
        for n_cards in (4, 8):
            sizes = [int(share * weights_bytes / 2 / n_cards) + GIB for share in SHARES * (n_cards // 4)]
            cards = tuple(Device(f"G{place}", "card", "CUDA", "gpu", size) for place, size in enumerate(sizes))
            rig = Rig(cards, make_host("host", 1024 * GIB))
            for strategy in strategies:
                memory, watch = ModelMemory(model), SearchLimit()
                begun = time.thread_time()
                find_strategy(strategy)(memory, rig, CONTEXT, Constraints(watch=watch))
                found.append((time.thread_time() - begun, watch.n_tried, f"{name}, {n_cards} cards, {strategy}"))
    return sorted(found, reverse=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("strategies", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--headers", nargs="*", help="measure every recorded header, or these")
    options = parser.parse_args()
    unit_ms = unit_milliseconds()
    if options.headers is not None:
        worst = measure_headers(options.headers, options.strategies)[:WORST]
        for seconds, n_tried, what in worst:
            print(f"{seconds:6.3f} s  {seconds * 1000 / unit_ms:5.0f} units  {n_tried:4} tried  {what}")
        print(json.dumps({"benchmark": "strategy_time", "unit_ms": round(unit_ms, 3), "worst": worst}))
        return
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, sizes in CARDS_GIB.items():
        cards = tuple(Device(f"G{place}", "card", "CUDA", "gpu", gib * GIB) for place, gib in enumerate(sizes))
        rig = Rig(cards, make_host("host", 1024 * GIB))
        memory = ModelMemory(truth_model(name))
        begun = time.thread_time()
        initial_layout(memory, rig, CONTEXT)
        found[name] = {"initial": {"seconds": round(time.thread_time() - begun, 3)}}
        for strategy in options.strategies:
            memory, watch = ModelMemory(truth_model(name)), SearchLimit()
            begun = time.thread_time()
            find_strategy(strategy)(memory, rig, CONTEXT, Constraints(watch=watch))
            seconds = time.thread_time() - begun
            found[name][strategy] = {"seconds": round(seconds, 3), "tried": watch.n_tried}
        print(f"{name}: {found[name]}", flush=True)
    slowest = max(each["seconds"] for each in found["deepseek-v3"].values())
    result = {
        "benchmark": "strategy_time",
        "unit_ms": round(unit_ms, 3),
        "slowest_seconds": slowest,
        "slowest_per_unit": round(slowest * 1000 / unit_ms),
        "models": found,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    # As in `layerdeck-cli plan`.
    with rare_full_collections():
        main()
