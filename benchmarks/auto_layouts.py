"""Soak: automatic layouts of random models on random lab rigs, each one that is called fitting loaded for real.

    python -m benchmarks.auto_layouts [--rigs 300] [--loads 2] [--seed 0]

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

from tests.support.lab_loads import random_caps, run_trials, write_models


def main() -> int:
    """Run all rigs and print what came of them."""
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
