"""Soak: automatic layouts of random models on random lab rigs, each one that is called fitting loaded for real.

    python -m benchmarks.auto_layouts [--rigs 300] [--loads 2] [--seed 0]

Before that every strategy is timed on well-known models of `tests/zoo`, hybrids among them, and six cards: those that
move experts to the CPU ask for estimates with overrides.

Every rig is a fresh lab of one to four capped workers. The last line is one JSON object; the exit code is 1 when a
layout that was called fitting did not load.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from engine.devices.device import Device, Rig, make_host
from engine.fit.strategies.catalogue import STRATEGIES
from engine.fit.strategies.constraints import NO_CONSTRAINTS
from engine.layout.context_settings import ContextSettings
from engine.memory.model_memory import ModelMemory
from engine.units import GIB
from tests.support.lab_loads import random_caps, run_trials, write_models
from tests.support.truth import truth_model

CARD_GIB = {"deepseek-v3": 80, "falcon-mamba-7b": 3, "granite-4.0-h-small": 12, "qwen3-30b-a3b": 4}
CARDS = 6


def time_strategies() -> dict[str, dict[str, float]]:
    """Return the seconds that each strategy takes for a model that was just opened, by model."""
    found: dict[str, dict[str, float]] = {}
    for name, gib in CARD_GIB.items():
        cards = tuple(Device(f"G{place}", "card", "CUDA", "gpu", gib * GIB) for place in range(CARDS))
        rig = Rig(cards, make_host("host", 1024 * GIB))
        found[name] = {}
        for strategy, find in STRATEGIES.items():
            memory = ModelMemory(truth_model(name))
            begun = time.perf_counter()
            find(memory, rig, ContextSettings(n_ctx=8192), NO_CONSTRAINTS)
            found[name][strategy] = round(time.perf_counter() - begun, 2)
        print(f"{name}: {found[name]} s", flush=True)
    return found


def main() -> int:
    """Run all rigs and print what came of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rigs", type=int, default=300)
    parser.add_argument("--loads", type=int, default=2, help="layouts tried on each rig")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    strategies = time_strategies()
    begun = time.perf_counter()
    loaded = not_fitting = 0
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        models = write_models(Path(folder))
        for number in range(options.rigs):
            random_numbers = random.Random(options.seed * 1_000_003 + number)
            tally = run_trials(random_caps(random_numbers), models, random_numbers, options.loads)
            loaded += tally.loaded
            not_fitting += tally.not_fitting
            failures += tally.failures
            for failure in tally.failures:
                print(f"rig {number}: {failure}", flush=True)
            if number % 20 == 19:
                print(f"{number + 1} rigs, {loaded} loaded, {len(failures)} failed", flush=True)
    result = {
        "benchmark": "auto_layouts",
        "rigs": options.rigs,
        "loaded": loaded,
        "not_fitting": not_fitting,
        "failed": len(failures),
        "seed": options.seed,
        "strategies_seconds": strategies,
        "seconds": round(time.perf_counter() - begun, 1),
    }
    print(json.dumps(result))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
