"""How well speed is told before it is felt: predictions against answers, on the host and workers of a lab.

    python -m benchmarks.speed_prediction [--rounds 3] [--tokens 32] [--model FILE.gguf] [--no-measuring]

Models of several shapes (dense F16, Q8_0, Q4_0, experts, and the real one where it is kept) answer on several layouts
each. The layouts of a model take turns, so that what else the machine does hits all of them; the median of the rounds
counts. `--clock cpu` counts the processor's time of all processes in place of the clock's: with one thread each they
work one after another, and what else a busy machine does is left out (so is waiting for the network). Then each answer
in turn is what was learnt, and all other layouts of the model are predicted with it. `noise` is how far single answers
are from their layout's median, in the middle: no prediction can be nearer than that.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

import gguf
import numpy as np
import psutil

from benchmarks._children import OurChild, our_child
from engine.demo.llama_writer import LlamaShape, write_llama
from engine.demo.vocabulary import byte_vocabulary
from engine.devices.device import CPU_ID, Rig
from engine.fit.speed_book import EMPTY_BOOK, SpeedBook
from engine.gguf.reader import read_model
from engine.layout.layout import Layout, Override, make_layout
from engine.memory.model_memory import ModelMemory
from engine.plan.edit import Edit
from engine.plan.plan import Plan
from engine.plan.preview import plan_speed
from engine.plan.requests import load_request
from engine.protocol.messages import Generate, Generated, Hello, LoadedModel, Piece, Reading, StageProgress
from engine.rigs.lab import LabRig
from engine.rigs.speed_test import measured_book, speed_lines
from engine.settings.context_settings import ContextSettings
from engine.speed.prediction import SpeedForecast
from engine.speed.speeds import Speeds, layout_class
from engine.speed.work import Work
from engine.units import GIB

KEPT_MODEL = Path.home() / ".cache/layerdeck/models/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "Tell a long story about a lighthouse keeper, a storm and a ship that nobody expected."
CONTEXT = ContextSettings(n_ctx=1024, load_mode="none", threads=1, threads_batch=1)
"""One thread, as workers have: several wait for each other, and on a busy machine for what else runs there."""
WORTH_TELLING = 1.1
"""Layouts that differ by less than this are alike."""


@dataclass(slots=True)
class Trial:
    """A layout of a model: what its answers took, in seconds per token, and how full the context was."""

    name: str
    plan: Plan
    seconds: list[float] = field(default_factory=list)
    fill_tokens: int = 0
    tokens: int = 0

    @property
    def token_s(self) -> float:
        return statistics.median(self.seconds)


def main() -> None:
    """Measure, compare and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--model", type=Path, default=KEPT_MODEL)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--no-measuring", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, LabRig([2 * GIB] * 3) as lab:
        book = EMPTY_BOOK
        if not options.no_measuring:
            book, problems = measured_book(lab.rig, book, n_threads=CONTEXT.threads)
            print(*speed_lines(lab.rig, book), *problems, sep="\n", flush=True)
        workers = [psutil.Process(lab.pid(device.id)) for device in lab.rig.devices]
        groups = []
        for path in models(Path(folder), options.model):
            trials = layouts_of(path, lab.rig)
            for _ in range(options.rounds):
                for trial in trials:
                    answer(trial, options.tokens, workers if options.clock == "cpu" else None)
            groups.append(trials)
            report_model(path.stem, trials, book)
    result = {"benchmark": "speed_prediction", "rounds": options.rounds, "measured": not options.no_measuring}
    result |= {"clock": options.clock}
    print(json.dumps(result | figures(groups, book)))


def models(folder: Path, real: Path) -> Iterator[Path]:
    """Yield files of the models, those that are generated as they are needed."""
    types = gguf.GGMLQuantizationType
    if real.exists():
        yield real
    for name, shape, of in (
        ("dense_f16", LlamaShape(12, 768, 12, 4, 2048, 4096), types.F16),
        ("wide_q8_0", LlamaShape(6, 1536, 24, 8, 4096, 4096), types.Q8_0),
        ("deep_q4_0", LlamaShape(40, 512, 8, 4, 1536, 4096), types.Q4_0),
        ("experts_f16", LlamaShape(8, 512, 8, 4, 1024, 4096, n_expert=8, n_expert_used=2), types.F16),
    ):
        yield write_model(folder / f"{name}.gguf", shape, of)


def write_model(path: Path, shape: LlamaShape, matrix_type: gguf.GGMLQuantizationType) -> Path:
    """Write a model with random weights."""
    generator = np.random.default_rng(1)

    def weights(_name: str, extents: tuple[int, ...]) -> np.ndarray:
        if len(extents) == 1:
            return np.ones(extents, np.float32)
        return generator.standard_normal(extents, np.float32) / np.float32(extents[-1] ** 0.5)

    write_llama(path, shape, byte_vocabulary(8192), name=path.stem, weights=weights, matrix_type=matrix_type)
    return path


def layouts_of(path: Path, rig: Rig) -> list[Trial]:
    """Return layouts from one device to many hops."""
    memory = ModelMemory(read_model(path))
    n = memory.model.n_layers
    first, second, third = (device.id for device in rig.devices[:3])
    places = {
        "host": [CPU_ID] * n,
        "worker": [first] * n,
        "host and worker": [CPU_ID] * (n // 2) + [first] * (n - n // 2),
        "two workers": [first] * (n // 2) + [second] * (n - n // 2),
        "three workers": [first] * (n // 3) + [second] * (n // 3) + [third] * (n - 2 * (n // 3)),
        "a quarter on the host": [CPU_ID] * (n // 4) + [first] * (n - n // 4),
        "turns": [(CPU_ID, first)[index // max(1, n // 6) % 2] for index in range(n)],
    }
    layouts: dict[str, Layout] = {name: make_layout(n, assigned) for name, assigned in places.items()}
    if any(block.expert_bytes for block in memory.model.blocks):
        layouts["experts on the host"] = replace(layouts["worker"], overrides=(Override(CPU_ID, part="experts"),))
    return [Trial(name, Plan(memory, rig, Edit(layout, CONTEXT))) for name, layout in layouts.items()]


def answer(trial: Trial, tokens: int, workers: Sequence[psutil.Process] | None = None) -> None:
    """Load, say a few words for nothing, answer for the clock, and unload.

    `workers`: count processor time, theirs included.
    """
    with our_child() as child:
        child.send(load_request(trial.plan))
        while not isinstance(message := child.message(), LoadedModel):
            if not isinstance(message, Hello | StageProgress):
                raise RuntimeError(f"no load: {message}")
        ask(child, 1, 2)
        answered, processor_time_s = ask(child, 2, tokens, workers)
    # The first token is there when the processor's clock starts.
    wall_s = answered.generation_seconds / answered.generated_tokens
    trial.seconds.append(wall_s if workers is None else processor_time_s / (answered.generated_tokens - 1))
    trial.tokens = answered.generated_tokens
    trial.fill_tokens = answered.prompt_tokens + answered.generated_tokens // 2


def ask(
    child: OurChild, number: int, tokens: int, workers: Sequence[psutil.Process] | None = None
) -> tuple[Generated, float]:
    """Have an answer; return its end and the processor time from its first token on, where `workers` are given."""
    processes = [] if workers is None else [*workers, psutil.Process(child.pid)]
    child.send(Generate(id=number, prompt=f"{number} {PROMPT}", max_tokens=tokens, temperature=0.0))
    begun_s = None
    while True:
        match child.message():
            case Generated() as message:
                return message, processor_s(processes) - (begun_s or 0.0)
            case Piece():
                begun_s = processor_s(processes) if begun_s is None else begun_s
            case Reading():
                pass
            case message:
                raise RuntimeError(f"no answer: {message}")


def processor_s(processes: Sequence[psutil.Process]) -> float:
    """Return the processor time that the threads of these have had, from Linux's finest clock of it."""
    folders = [Path(f"/proc/{process.pid}/task") for process in processes]
    spent_ns = 0
    for thread in (thread for folder in folders for thread in folder.iterdir()):
        with suppress(FileNotFoundError):  # it has ended
            spent_ns += int((thread / "schedstat").read_text().split()[0])
    return spent_ns / 1e9


def predicted(trial: Trial, speeds: Speeds) -> SpeedForecast:
    """Return what is predicted of a trial."""
    found = plan_speed(Work(trial.plan.model), trial.plan, speeds, trial.fill_tokens)
    if found is None:
        raise RuntimeError(f"{trial.name} cannot be planned")
    return found


def learnt(book: SpeedBook, trial: Trial) -> SpeedBook:
    """Return the book after an answer on a trial's layout."""
    rig, layout = trial.plan.rig, trial.plan.edit.layout
    bare = predicted(trial, replace(book.speeds(rig), ratios={}, factors={}))
    return book.with_answer(layout_class(layout, rig), rig, bare, trial.tokens, 1 / trial.token_s)


def report_model(name: str, trials: Sequence[Trial], book: SpeedBook) -> None:
    """Print what was measured and predicted of a model."""
    rig = trials[0].plan.rig
    after = learnt(book, trials[2]).speeds(rig)
    for trial in trials:
        before = predicted(trial, book.speeds(rig))
        parts = ", ".join(f"{each.id} {each.seconds * 1e3:.1f}" for each in before.devices)
        print(
            f"{name}, {trial.name}: {trial.token_s * 1e3:.1f} ms a token ({noise([trial]):.0%} noise), predicted "
            f"{before.token_s * 1e3:.1f} ({parts}), after an answer {predicted(trial, after).token_s * 1e3:.1f}",
            flush=True,
        )


def figures(groups: Sequence[Sequence[Trial]], book: SpeedBook) -> dict[str, object]:
    """Return errors and orders before any answer, and after one of each layout in turn."""
    errors, after, ranks, ranks_after, pairs = [], [], [], [], 0
    for trials in groups:
        speeds = book.speeds(trials[0].plan.rig)
        before = [predicted(trial, speeds).token_s for trial in trials]
        errors += [abs(found / trial.token_s - 1) for found, trial in zip(before, trials, strict=True)]
        ranks += order_hits(trials, before)
        pairs += len(order_hits(trials, before))
        for taught in trials:
            speeds = learnt(book, taught).speeds(taught.plan.rig)
            found = [predicted(trial, speeds).token_s for trial in trials]
            after += [
                abs(each / trial.token_s - 1) for each, trial in zip(found, trials, strict=True) if trial is not taught
            ]
            ranks_after += order_hits(trials, found)
    return {
        "layouts": sum(map(len, groups)),
        "pairs": pairs,
        "noise": round(noise([trial for trials in groups for trial in trials]), 3),
        "median_error_before": round(statistics.median(errors), 3),
        "median_error": round(statistics.median(after), 3),
        "error_90": round(statistics.quantiles(after, n=10)[-1], 3),
        "right_before": round(statistics.mean(ranks), 3),
        "right": round(statistics.mean(ranks_after), 3),
    }


def order_hits(trials: Sequence[Trial], found: Sequence[float]) -> list[bool]:
    """Return for each pair of layouts that differ whether the faster one was predicted to be."""
    times = [trial.token_s for trial in trials]
    return [
        (found[one] < found[other]) == (times[one] < times[other])
        for one, other in combinations(range(len(trials)), 2)
        if max(times[one], times[other]) > WORTH_TELLING * min(times[one], times[other])
    ]


def noise(trials: Sequence[Trial]) -> float:
    """Return how far answers are from the median of their layout, in the middle."""
    return statistics.median(abs(each / trial.token_s - 1) for trial in trials for each in trial.seconds)


if __name__ == "__main__":
    main()
