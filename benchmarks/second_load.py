"""Time of the second load of a model right after its unload, as ratios to the first load and to llama.cpp alone.

    python -m benchmarks.second_load [--model FILE.gguf] [--rounds 5]

In each round the file is removed from the page cache, the model is loaded twice in one session, and then by a child
that only calls `llama_model_load_from_file` (no context, no warm-up). All are on the CPU. Times are wall-clock
milliseconds from the request to the end, with the start of the process; printed are medians, and the medians of the
rounds' ratios. `phase_...` are the parts of a second load: start of the child with its imports, file, context, and
warm-up. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec

from benchmarks._children import load_request, our_child, run_bare, write_model
from benchmarks.load_modes import forget
from engine.base.cancellation import CancelToken
from engine.devices.device import CPU_ID, Rig
from engine.machines.bench.loads import SessionSubject
from engine.machines.rigs.discovery import host_device
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.messages import Hello, LoadedModel, StageProgress

N_CTX = 1024
PHASES = {"allocate": "start", "context": "file", "warm_up": "context", "end": "warm_up"}
"""The phase that ends when a stage of the load begins, by the name of that stage."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=Path.home() / ".cache") as folder:
        path = options.model or write_model(Path(folder) / "load.gguf", n_layers=8, n_embd=768, n_ff=2048)
        for _ in range(options.rounds):
            for name, seconds in one_round(path).items():
                times.setdefault(name, []).append(seconds)
    result: dict[str, object] = {"benchmark": "second_load", "rounds": options.rounds}
    for name, found in times.items():
        print(f"{name}: {median(found) * 1e3:.0f} ms")
        result[f"{name}_ms"] = round(median(found) * 1e3)
    for base in ("first", "bare"):
        ratio = median(one / other for one, other in zip(times["second"], times[base], strict=True))
        print(f"second load: {ratio:.2f} of {base}")
        result[f"second_over_{base}"] = round(ratio, 3)
    print(json.dumps(result))


def one_round(path: Path) -> dict[str, float]:
    """Return seconds by name: of each load, of the phases of a second load, and of a full warm-up."""
    model = read_model(path)
    context = ContextSettings(n_ctx=N_CTX, threads=1, load_mode="mmap")
    plan = Plan(ModelMemory(model), Rig((), host_device()), Edit(single_device(model.n_layers, CPU_ID), context))
    forget(path)
    found: dict[str, float] = {}
    with SessionSubject(CancelToken()) as subject:
        for name in ("first", "second"):
            begun = time.perf_counter()
            subject.load(plan)
            found[name] = time.perf_counter() - begun
    found["bare"], _ = run_bare("load", path, load_mode="mmap", n_ctx=N_CTX, threads=1)
    found |= {f"phase_{name}": seconds for name, seconds in phases(path, is_known=True).items()}
    return found | {"phase_full_warm_up": phases(path, is_known=False)["warm_up"]}


def phases(path: Path, *, is_known: bool) -> dict[str, float]:
    """Load the model in a new child; return the seconds of each phase.

    `is_known`: the model was loaded before, so that its warm-up is shorter.
    """
    found: dict[str, float] = {}
    with our_child() as child:
        begun = child.begun
        request = load_request(path, load_mode="mmap", n_ctx=N_CTX, threads=1)
        child.send(msgspec.structs.replace(request, is_known=is_known))
        while True:
            message = child.message()
            now = time.perf_counter()
            stage = "end" if isinstance(message, LoadedModel) else getattr(message, "stage", "")
            if not isinstance(message, Hello | StageProgress | LoadedModel):
                raise RuntimeError(f"no load: {message}")
            if stage in PHASES and PHASES[stage] not in found:
                found[PHASES[stage]], begun = now - begun, now
            if stage == "end":
                return found


if __name__ == "__main__":
    main()
