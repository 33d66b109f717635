"""Real loads of automatic layouts of random models on random lab rigs, to find forecasts of fit that are wrong.

    python -m benchmarks.auto_layouts [--rigs 300] [--loads 2] [--seed 0]

Each rig is a new lab of one to four workers with memory caps. `--loads`: layouts for each rig. Printed are the numbers
of layouts that loaded, were forecast not to fit (and not loaded), and were forecast to fit but failed. Goal: none
failed; otherwise the exit code is 1. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.support.lab_loads import random_caps, run_trials, write_models


def main() -> int:
    """Load layouts on all rigs, and print how the loads ended."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rigs", type=int, default=300)
    parser.add_argument("--loads", type=int, default=2, help="layouts tried on each rig")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
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
        "seconds": round(time.perf_counter() - begun, 1),
    }
    print(json.dumps(result))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
