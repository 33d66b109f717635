"""Time of a probe, as a ratio to a child that makes the same `no_alloc` load and context with llama.cpp alone.

    python -m benchmarks.probe_time [--model FILE.gguf]

The default model has a vocabulary of 128,256 tokens, and a hole in place of the weights. All are measured in turns, by
the wall clock of the parent process; printed are median milliseconds:

`bare_ms`: the child with llama.cpp alone, with its start.
`bare_load_ms`: only load and context in that child.
`first_ms`: a probe of settings that were not probed before.
`waiting_ms`: the same if a child was started before, as the window does after an edit.
`again_ms`: a probe that the cache answers.

`ratio` is `first_ms` to `bare_ms`, `ratio_waiting_to_load` is `waiting_ms` to `bare_load_ms`. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import gguf

from benchmarks._children import run_bare, usable_processors
from engine.devices.device import CPU_ID, Rig
from engine.machines.rigs.discovery import host_device
from engine.model.demo.llama_writer import LlamaShape, byte_vocabulary, write_llama
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.probing.probe import DEFAULT_TIMEOUT_S, ProbeCache, ProbeRun
from engine.runtime.process.blocking_child import SpareChild
from tests.support.plans import make_plan

ROUNDS = 7
N_CTX = 4096
N_VOCAB = 128256
PAUSE_S = 0.5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        times = measure(options.model or write_hole_model(Path(folder) / "probe.gguf"))
    medians = {f"{name}_ms": round(statistics.median(seconds) * 1000, 2) for name, seconds in times.items()}
    result = {
        "benchmark": "probe_time",
        **medians,
        "ratio": round(medians["first_ms"] / medians["bare_ms"], 3),
        "ratio_waiting_to_load": round(medians["waiting_ms"] / medians["bare_load_ms"], 3),
        "rounds": ROUNDS,
    }
    print(", ".join(f"{name} {value}" for name, value in medians.items()))
    print(json.dumps(result))


def measure(path: Path) -> dict[str, list[float]]:
    """Return the seconds of all counted rounds, by measurement."""
    times: dict[str, list[float]] = {"bare": [], "bare_load": [], "first": [], "waiting": [], "again": []}
    model, threads, cache = read_model(path), usable_processors(), ProbeCache()
    rig = Rig((), host_device())
    layout = single_device(model.n_layers, CPU_ID)
    for number in range(ROUNDS + 1):
        # other settings each time: nothing is to come from the cache
        context = ContextSettings(n_ctx=N_CTX + 256 * number, threads=threads)
        bare, figures = run_bare("probe", path, load_mode="none", n_ctx=context.n_ctx, threads=threads)
        seconds = {"bare": bare, "bare_load": figures["load_seconds"]}
        for name in ("first", "waiting", "again"):
            spare = SpareChild(timeout_s=DEFAULT_TIMEOUT_S)
            if name == "waiting":
                cache = ProbeCache()
                wait_in_readiness(spare)
            begun = time.perf_counter()
            ProbeRun(make_plan(model, rig, Edit(layout, context)), cache, spare).run()
            seconds[name] = time.perf_counter() - begun
        if number:  # the first round fills the file cache
            for name, value in seconds.items():
                times[name].append(value)
    return times


def wait_in_readiness(spare: SpareChild) -> None:
    """Start the spare child, and give it as much time as the window does: the pause after an edit."""
    spare.prepare()
    time.sleep(PAUSE_S)


def write_hole_model(path: Path) -> Path:
    """Write the header of a model of 8 billion parameters, with a hole in place of the weights; return `path`."""
    shape = LlamaShape(32, 4096, 32, 8, 14336, 131072)
    write_llama(
        path, shape, byte_vocabulary(N_VOCAB), name=path.stem, weights=None,
        matrix_type=gguf.GGMLQuantizationType.Q4_K,
    )  # fmt: skip
    return path


if __name__ == "__main__":
    main()
