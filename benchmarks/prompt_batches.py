"""Speed of prompts by micro batch, as ratios to the default of 512 tokens, with the forecast memory of each.

    python -m benchmarks.prompt_batches [--model FILE.gguf] [--prompt-tokens 1024] [--rounds 5] [--threads 1]

All layers are on the CPU. The micro batches take turns, as in Compare Speed, which uses the same code and stores its
choice for later loads (`engine.machines.bench.choices`). Printed are the ratio of tokens per second with its 95 %
interval, and the bytes of the forecast. The last line is one JSON object, in which `chosen` is the preferred size.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import msgspec

from benchmarks._children import write_model
from engine.base.cancellation import CancelToken
from engine.base.units import format_bytes
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig
from engine.machines.bench.candidates import MICRO_BATCHES, Candidate
from engine.machines.bench.choices import choices_of
from engine.machines.bench.results import Preset, compare
from engine.machines.bench.run import BenchRequest, run_benchmark
from engine.machines.rigs.discovery import host_device
from engine.model.gguf.reader import read_model
from engine.planning.fit.speed_book import EMPTY_BOOK
from engine.planning.layout.layout import single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings

ANSWER_TOKENS = 16


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    result: dict[str, object] = {"benchmark": "prompt_batches", "rounds": options.rounds}
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or write_model(Path(folder) / "batches.gguf", n_layers=4, n_embd=256, n_ff=704)
        candidates = layouts(path, options.prompt_tokens, options.threads)
        preset = Preset("batches", options.rounds, options.prompt_tokens, ANSWER_TOKENS)
        request = BenchRequest(candidates, preset)
        results, _ = run_benchmark(request, EMPTY_BOOK, CancelToken(), lambda _progress: None)
    base = results.layouts[0]
    for candidate, measured in zip(candidates, results.layouts, strict=True):
        need = sum(row.need_bytes for row in candidate.plan.forecast)
        found = compare(base, measured, "prompt")
        ratio = 1.0 if measured is base or found is None else found.ratio
        interval = "" if found is None or found.low is None else f" ({found.low:.2f} to {found.high:.2f})"
        print(f"micro batch {measured.name}: {ratio:.2f}{interval}, {format_bytes(need)}")
        result |= {f"ratio_{measured.name}": round(ratio, 3), f"bytes_{measured.name}": need}
    chosen = [each.value for each in choices_of(results, candidates) if each.setting == "n_ubatch"]
    print(json.dumps(result | {"chosen": chosen[0] if chosen else None, "other_load": base.other_load}))


def layouts(path: Path, prompt_tokens: int, threads: int) -> tuple[Candidate, ...]:
    """Return the plan with the default micro batch, then one for each micro batch up to the length of the prompt."""
    model = read_model(path)
    context = ContextSettings(n_ctx=prompt_tokens + 256, threads=threads)
    plan = Plan(ModelMemory(model), Rig((), host_device()), Edit(single_device(model.n_layers, CPU_ID), context))
    found = [Candidate(str(context.n_ubatch), plan)]
    for size in MICRO_BATCHES:
        if size <= prompt_tokens:
            used = msgspec.structs.replace(context, n_ubatch=size, n_batch=max(size, context.n_batch))
            found.append(Candidate(str(size), plan.with_edit(replace(plan.edit, context=used))))
    return tuple(found)


if __name__ == "__main__":
    main()
