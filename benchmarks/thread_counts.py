"""Speed of the CPU by number of threads, as ratios to the default number, for answers and prompts.

    python -m benchmarks.thread_counts [--rounds 7]

It repeats the measurement of `layerdeck-cli devices --measure`, in turns, for all numbers of threads that this command
tries. `bound` is the default number with each thread bound to a physical core. Printed are ratios with their 95 %
intervals, and the share of the processors that other programs used (`other_load`): if one core is busy, all threads
wait for it. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence

from engine.base.processor import own_processor, usable_processors
from engine.machines.bench.readings import load_share, processor_seconds
from engine.machines.bench.statistics import ratio_of, turn_order
from engine.machines.bench.thread_counts import thread_counts_to_try
from engine.machines.rigs.discovery import host_device
from engine.runtime.plan_requests import bound_threads
from engine.runtime.process.blocking_child import BlockingChild
from engine.runtime.protocol.messages import ThreadSpeeds
from engine.runtime.protocol.requests import MeasureThreads

SIZE_BYTES = 128 << 20
MEASURED_S = 0.05
TIMEOUT_S = 120.0
Rates = dict[str, list[tuple[float, float]]]
"""Speeds of (answers, prompts) in each round, by number of threads."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    processor = own_processor()
    counts, base = thread_counts_to_try(processor, len(usable_processors())), processor.threads
    size_bytes = min(SIZE_BYTES, host_device().available_bytes // 8)
    begun_s, (busy_s, own_s) = time.monotonic(), processor_seconds()
    rates: Rates = {name: [] for name in (*map(str, counts), "bound")}
    with (
        BlockingChild(timeout_s=TIMEOUT_S, name="threads") as free,
        BlockingChild(timeout_s=TIMEOUT_S, name="threads", environment=bound_threads()) as bound,
    ):
        for number in range(rounds):
            for name in turn_order(tuple(rates), number):
                child, count = (bound, base) if name == "bound" else (free, int(name))
                request = MeasureThreads(counts=(count,), size_bytes=size_bytes, measured_s=MEASURED_S)
                speeds = child.ask(request, ThreadSpeeds)
                rates[name].append((speeds.answers[0], speeds.prompts[0]))
        # While the children still run: their time is ours.
        now_busy_s, now_own_s = processor_seconds()
    others_s = (now_busy_s - busy_s) - (now_own_s - own_s)
    share = load_share(others_s, time.monotonic() - begun_s, os.cpu_count() or 1)
    result: dict[str, object] = {"benchmark": "thread_counts", "default": base, "rounds": rounds, "other_load": share}
    for at, kind in enumerate(("answer", "prompt")):
        for name in rates:
            if name != str(base):
                result[f"{kind}_{name}"] = told(kind, name, [
                    (ours[at], theirs[at]) for ours, theirs in zip(rates[str(base)], rates[name], strict=True)
                ])  # fmt: skip
    print(f"other programs used {share or 0:.0%} of the processors")
    print(json.dumps(result))


def told(kind: str, name: str, pairs: Sequence[tuple[float, float]]) -> float | None:
    """Print the ratio of `name` threads to the default number, and return it."""
    ratio = ratio_of(pairs)
    if ratio is None:
        return None
    print(f"{kind}, {name} threads: {ratio.value:.2f} of the default ({ratio.low or 0:.2f} to {ratio.high or 0:.2f})")
    return round(ratio.value, 3)


if __name__ == "__main__":
    main()
