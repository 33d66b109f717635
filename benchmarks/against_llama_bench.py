"""Whether `bench` measures what llama-bench measures: the same model and settings on the CPU, in turns.

    python -m benchmarks.against_llama_bench LLAMA_BENCH [--model FILE.gguf] [--rounds 7] [--threads N]
        [--prompt-tokens 512] [--answer-tokens 128]

LLAMA_BENCH is llama.cpp's program, built from the source of the installed engine. Each round runs it once with its own
warm-up, and a load of ours with a warm-up; the order alternates. The median of the rounds' ratios counts, as in
`bench`. llama-bench neither samples nor turns tokens into text; ours does both, for each token of an answer. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from engine.base.cancellation import CancelToken
from engine.base.processor import default_threads
from engine.devices.device import CPU_ID, Rig
from engine.machines.bench.candidates import Candidate, Predictor
from engine.machines.bench.loads import SessionSubject
from engine.machines.bench.readings import DeviceWatch
from engine.machines.bench.results import Preset
from engine.machines.bench.runner import Bench
from engine.machines.bench.statistics import Ratio, ratio_of
from engine.machines.rigs.discovery import host_device
from engine.model.gguf.reader import read_model
from engine.planning.fit.speed_book import EMPTY_BOOK
from engine.planning.layout.layout import single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings

KEPT_MODEL = Path.home() / ".cache/layerdeck/models/SmolLM2-135M-Instruct.Q4_1.gguf"
GOAL = 0.03
"""Largest difference of a median that counts as agreement."""


def main() -> None:
    """Measure both in turns and print the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("--model", type=Path, default=KEPT_MODEL)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--answer-tokens", type=int, default=128)
    options = parser.parse_args()
    preset = Preset("once", 1, options.prompt_tokens, options.answer_tokens)
    plan = plan_of(options.model, options.threads, preset)
    pairs: dict[str, list[tuple[float, float]]] = {"prompt": [], "generation": []}
    for number in range(options.rounds):
        if number % 2:
            ours, theirs = measure_ours(plan, preset), measure_theirs(options.program, options.model, plan, preset)
        else:
            theirs, ours = measure_theirs(options.program, options.model, plan, preset), measure_ours(plan, preset)
        for name, rates in pairs.items():
            rates.append((theirs[name], ours[name]))
        print(
            number + 1,
            *(f"{name} {rates[-1][0]:.1f} : {rates[-1][1]:.1f}" for name, rates in pairs.items()),
            flush=True,
        )
    found = {name: ratio_of(rates) for name, rates in pairs.items()}
    print(json.dumps({"benchmark": "against_llama_bench", "rounds": options.rounds, "threads": options.threads}
                     | {name: figures(each) for name, each in found.items()}))  # fmt: skip


def figures(ratio: Ratio | None) -> dict[str, object]:
    """Return the ratio of ours to theirs, its interval, and whether both agree."""
    assert ratio is not None
    return {"ratio": round(ratio.value, 3), "low": ratio.low, "high": ratio.high, "agree": abs(ratio.value - 1) <= GOAL}


def plan_of(model: Path, threads: int, preset: Preset) -> Plan:
    """Return a plan of the whole model on the CPU with the settings that `measure_theirs` passes."""
    file = read_model(model)
    n_ctx = preset.prompt_tokens + preset.answer_tokens + 256
    context = ContextSettings(n_ctx=n_ctx, threads=threads, threads_batch=threads, flash_attn="on", load_mode="mmap")
    return Plan(ModelMemory(file), Rig((), host_device()), Edit(single_device(file.n_layers, CPU_ID), context))


def measure_ours(plan: Plan, preset: Preset) -> dict[str, float]:
    """Return our tokens per second of one load."""
    with SessionSubject(CancelToken()) as subject, DeviceWatch(plan.rig) as watch:
        results = Bench(subject, watch, preset, Predictor(EMPTY_BOOK, preset)).run([Candidate("ours", plan)])
    (layout,) = results.layouts
    prompt, generation = layout.middle("prompt"), layout.middle("generation")
    assert prompt is not None, layout.problem
    assert generation is not None, layout.problem
    return {"prompt": prompt, "generation": generation}


def measure_theirs(program: Path, model: Path, plan: Plan, preset: Preset) -> dict[str, float]:
    """Return llama-bench's tokens per second of one run. The answer follows the prompt, as in ours (`-d`)."""
    context = plan.settings
    with tempfile.TemporaryDirectory() as folder:
        words: list[object] = ["-m", model, "-t", context.threads, "-ngl", 0, "-fa", 1, "-r", 1, "-o", "json"]
        words += ["-b", context.n_batch, "-ub", context.n_ubatch]
        prompt = _run(program, folder, [*words, "-p", preset.prompt_tokens, "-n", 0])
        answer = _run(program, folder, [*words, "-p", 0, "-n", preset.answer_tokens, "-d", preset.prompt_tokens])
    return {"prompt": prompt, "generation": answer}


def _run(program: Path, folder: str, words: list[object]) -> float:
    command = [str(program.resolve()), *map(str, words)]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    (test,) = json.loads(done.stdout)
    return float(test["avg_ts"])


if __name__ == "__main__":
    main()
