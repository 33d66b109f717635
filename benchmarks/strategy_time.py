"""Time that every strategy of automatic layouts takes for a model that was just opened.

    python -m benchmarks.strategy_time [STRATEGY ...]

DeepSeek-V3 on eight unlike cards, which hold about half of it, and well-known models of `tests/zoo`, hybrids among
them, on six equal ones. `tried` are layouts that were estimated; `unit` is the fixed work of `benchmarks.drag_time` in
the same run. Times are seconds of the thread. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time

from benchmarks.drag_time import unit_milliseconds
from engine.base.units import GIB
from engine.devices.device import Device, Rig, make_host
from engine.planning.fit.strategies.catalogue import STRATEGIES, find_strategy
from engine.planning.fit.strategies.constraints import Constraints, Watch
from engine.planning.fit.strategies.fastest import initial_layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from tests.support.truth import truth_model

CARDS_GIB: dict[str, tuple[int, ...]] = {
    "deepseek-v3": (80, 48, 48, 40, 32, 24, 24, 16),
    "falcon-mamba-7b": (3,) * 6,
    "granite-4.0-h-small": (12,) * 6,
    "qwen3-30b-a3b": (4,) * 6,
    "gemma-2-27b": (6, 6),
}
CONTEXT = ContextSettings(n_ctx=8192)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("strategies", nargs="*", default=list(STRATEGIES))
    options = parser.parse_args()
    unit_ms = unit_milliseconds()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, sizes in CARDS_GIB.items():
        cards = tuple(Device(f"G{place}", "card", "CUDA", "gpu", gib * GIB) for place, gib in enumerate(sizes))
        rig = Rig(cards, make_host("host", 1024 * GIB))
        memory = ModelMemory(truth_model(name))
        begun = time.thread_time()
        initial_layout(memory, rig, CONTEXT)
        found[name] = {"initial": {"seconds": round(time.thread_time() - begun, 3)}}
        for strategy in options.strategies:
            memory, watch = ModelMemory(truth_model(name)), Watch()
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
    main()
