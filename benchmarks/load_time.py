"""Time of a load in a model child, as a ratio to a child that only calls `llama_model_load_from_file`.

    python -m benchmarks.load_time [--model FILE.gguf] [--load-mode none|mmap]

Both are measured in the parent process, by the wall clock from the start of the child, in turns. Printed are median
milliseconds:

`bare_ms`: the child that only loads.
`ours_weights_ms`, `ours_without_warm_up_ms`, `ours_ms`: ours until the weights are loaded, until the context is made,
and until the end of the warm-up.

`ratio_weights_only` is `ours_weights_ms` to `bare_ms`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks._children import load_request, our_child, run_bare, usable_processors, write_model
from engine.runtime.protocol.messages import Hello, LoadedModel, StageProgress

ROUNDS = 5
N_CTX = 4096


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--load-mode", choices=["none", "mmap"], default="none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or write_model(Path(folder) / "load.gguf", n_layers=12, n_embd=1024, n_ff=2816)
        times = measure(path, options.load_mode)
        size_bytes = path.stat().st_size
    medians = {f"{name}_ms": round(statistics.median(seconds) * 1000, 1) for name, seconds in times.items()}
    result = {
        "benchmark": "load_time",
        **medians,
        "ratio_weights_only": round(medians["ours_weights_ms"] / medians["bare_ms"], 3),
        "load_mode": options.load_mode,
        "model_bytes": size_bytes,
        "rounds": ROUNDS,
    }
    print(", ".join(f"{name} {value}" for name, value in medians.items()))
    print(json.dumps(result))


def measure(path: Path, load_mode: str) -> dict[str, list[float]]:
    """Return the seconds of all counted rounds, by measurement."""
    times: dict[str, list[float]] = {"bare": [], "ours_weights": [], "ours_without_warm_up": [], "ours": []}
    threads = usable_processors()
    for number in range(ROUNDS + 1):
        bare, _ = run_bare("load", path, load_mode=load_mode, n_ctx=N_CTX, threads=threads)
        ours = our_times(path, load_mode, threads)
        if number:  # the first round fills the file cache
            times["bare"].append(bare)
            for name, seconds in ours.items():
                times[name].append(seconds)
    return times


def our_times(path: Path, load_mode: str, threads: int) -> dict[str, float]:
    """Load the model in a new child; return the seconds from its start to the end of each stage."""
    reached: dict[str, float] = {}
    with our_child() as child:
        child.send(load_request(path, load_mode=load_mode, n_ctx=N_CTX, threads=threads))
        while not isinstance(message := child.message(), LoadedModel):
            if not isinstance(message, Hello | StageProgress):
                raise RuntimeError(f"no load: {message}")
            if isinstance(message, StageProgress):
                reached.setdefault(message.stage, time.perf_counter() - child.begun)
        reached["end"] = time.perf_counter() - child.begun
    return {
        "ours_weights": reached["context"],
        "ours_without_warm_up": reached["warm_up"],
        "ours": reached["end"],
    }


if __name__ == "__main__":
    main()
