"""Speed by `layerdeck-cli bench`, as a ratio to llama-bench: the same model and settings on the same devices.

    python -m benchmarks.against_llama_bench LLAMA_BENCH [--model FILE.gguf] [--rounds 7] [--threads N] [--workers N]
        [--prompt-tokens 512] [--answer-tokens 128]

LLAMA_BENCH is the program llama-bench, built from the llama.cpp sources of the installed engine. The model is on the
CPU, or with `--workers` in equal parts on the workers of a lab rig. Each round runs both programs once, each with its
own load and warm-up, in alternating order. Printed are tokens per second of each round, for prompts and for answers,
and at the end the median of the rounds' ratios (ours to llama-bench's) with its interval. Unlike llama-bench, ours
samples and detokenizes each token of an answer. Goal: both ratios differ by at most 3 % from 1. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

from engine.base.cancellation import CancelToken
from engine.base.processor import default_threads
from engine.base.units import GIB
from engine.devices.device import CPU_ID, Rig
from engine.machines.bench.candidates import Candidate, Predictor
from engine.machines.bench.loads import SessionSubject
from engine.machines.bench.readings import DeviceWatch
from engine.machines.bench.results import Preset
from engine.machines.bench.runner import Bench
from engine.machines.bench.statistics import Ratio, ratio_of
from engine.machines.rigs.discovery import host_device
from engine.machines.rigs.lab import LabRig
from engine.model.gguf.reader import read_model
from engine.planning.fit.speed_book import EMPTY_BOOK
from engine.planning.layout.layout import make_layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings

KEPT_MODEL = Path.home() / ".cache/layerdeck/models/SmolLM2-135M-Instruct.Q4_1.gguf"
WORKER_BYTES = GIB
GOAL = 0.03
"""Largest difference of a median ratio from 1 that counts as agreement."""


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("--model", type=Path, default=KEPT_MODEL)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--answer-tokens", type=int, default=128)
    options = parser.parse_args()
    preset = Preset("once", 1, options.prompt_tokens, options.answer_tokens)
    with ExitStack() as stack:
        rig = Rig((), host_device())
        if options.workers:
            rig = stack.enter_context(LabRig([WORKER_BYTES] * options.workers)).rig
        measure(options, plan_of(options.model, rig, options.threads, preset), preset)


def measure(options: argparse.Namespace, plan: Plan, preset: Preset) -> None:
    """Measure the plan with both programs in turns; print each round, and the ratios at the end."""
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
    print(json.dumps({"benchmark": "against_llama_bench", "rounds": options.rounds, "threads": options.threads,
                      "workers": options.workers}
                     | {name: figures(each) for name, each in found.items()}))  # fmt: skip


def figures(ratio: Ratio | None) -> dict[str, object]:
    """Return the median ratio of ours to llama-bench's, its interval, and whether it meets the goal."""
    assert ratio is not None
    return {"ratio": round(ratio.value, 3), "low": ratio.low, "high": ratio.high, "agree": abs(ratio.value - 1) <= GOAL}


def plan_of(model: Path, rig: Rig, threads: int, preset: Preset) -> Plan:
    """Return a plan with the settings that `measure_theirs` passes to llama-bench.

    All layers are on the CPU, or in equal parts on the workers of `rig`.
    """
    file = read_model(model)
    count, n_layers = len(rig.devices), file.n_layers
    homes = [rig.devices[layer * count // n_layers].id if count else CPU_ID for layer in range(n_layers)]
    # Prompt lengths are approximate.
    n_ctx = preset.prompt_tokens + preset.answer_tokens + 64
    context = ContextSettings(n_ctx=n_ctx, threads=threads, threads_batch=threads, flash_attn="on", load_mode="mmap")
    return Plan(ModelMemory(file), rig, Edit(make_layout(n_layers, homes, homes[-1]), context))


def measure_ours(plan: Plan, preset: Preset) -> dict[str, float]:
    """Load the model once with our engine; return tokens per second of prompt and generation."""
    with SessionSubject(CancelToken()) as subject, DeviceWatch(plan.rig) as watch:
        results = Bench(subject, watch, preset, Predictor(EMPTY_BOOK, preset)).run([Candidate("ours", plan)])
    (layout,) = results.layouts
    prompt, generation = layout.middle("prompt"), layout.middle("generation")
    assert prompt is not None, layout.problem
    assert generation is not None, layout.problem
    return {"prompt": prompt, "generation": generation}


def measure_theirs(program: Path, model: Path, plan: Plan, preset: Preset) -> dict[str, float]:
    """Run llama-bench; return its tokens per second of prompt and generation.

    The generation begins after a prompt (`-d`), as in our measurement.
    """
    context, parameters = plan.settings, plan.parameters
    with tempfile.TemporaryDirectory() as folder:
        words: list[object] = ["-m", model, "-t", context.threads, "-fa", 1, "-r", 1, "-o", "json"]
        words += ["-ngl", parameters.n_gpu_layers]
        if plan.rig.devices:
            words += ["-rpc", ",".join(str(device.endpoint) for device in plan.rig.devices)]
            words += ["-ts", "/".join(map(str, parameters.tensor_split[: len(plan.rig.devices)]))]
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
