"""Time of a load by load mode: of a file that is not in the page cache, and once more right after an unload.

    python -m benchmarks.load_modes [--model FILE.gguf] [--rounds 5]

The modes take turns, and what counts is each round's ratio to the first mode in the same round. The file is pushed out
of the page cache with POSIX_FADV_DONTNEED, which needs no rights but leaves pages that somebody else maps; a hypervisor
may hold it in memory still. Times are from the request to the loaded model, with a child that runs already, as in the
window. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks._children import load_request, our_child, write_model
from engine.runtime.protocol.messages import Hello, LoadedModel, StageProgress

MODES = ("mmap", "none", "direct_io")
"""The first is what the others are compared with."""
N_CTX = 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    times: dict[str, dict[str, list[float]]] = {mode: {"cold": [], "again": []} for mode in MODES}
    with tempfile.TemporaryDirectory(dir=Path.home() / ".cache") as folder:
        path = options.model or write_model(Path(folder) / "load.gguf", n_layers=12, n_embd=1024, n_ff=2816)
        for number in range(options.rounds):
            # Another mode is first in each round.
            for mode in MODES[number % len(MODES) :] + MODES[: number % len(MODES)]:
                forget(path)
                times[mode]["cold"].append(load_s(path, mode))
                times[mode]["again"].append(load_s(path, mode))
        size_bytes = path.stat().st_size
    result: dict[str, object] = {"benchmark": "load_modes", "model_bytes": size_bytes, "rounds": options.rounds}
    for mode, found in times.items():
        for kind, seconds in found.items():
            first = times[MODES[0]][kind]
            ratio = statistics.median(one / other for one, other in zip(seconds, first, strict=True))
            print(f"{mode}, {kind}: {statistics.median(seconds) * 1e3:.0f} ms, {ratio:.2f} of {MODES[0]}")
            result |= {
                f"{mode}_{kind}_ms": round(statistics.median(seconds) * 1e3),
                f"{mode}_{kind}_ratio": round(ratio, 3),
            }
        again = statistics.median(one / other for one, other in zip(found["again"], found["cold"], strict=True))
        result[f"{mode}_again_over_cold"] = round(again, 3)
    print(json.dumps(result))


def forget(path: Path) -> None:
    """Push a file out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def load_s(path: Path, mode: str) -> float:
    """Load, and return the seconds from the request to the loaded model."""
    with our_child() as child:
        while not isinstance(child.message(), Hello):
            pass
        begun = time.perf_counter()
        child.send(load_request(path, load_mode=mode, n_ctx=N_CTX, threads=1))
        while not isinstance(message := child.message(), LoadedModel):
            if not isinstance(message, StageProgress):
                raise RuntimeError(f"no load: {message}")
        return time.perf_counter() - begun


if __name__ == "__main__":
    main()
