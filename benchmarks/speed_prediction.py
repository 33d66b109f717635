"""How well speed is told before it is felt: predictions against answers, on the host and workers of a lab.

    python -m benchmarks.speed_prediction [--rounds 3] [--tokens 32] [--model FILE.gguf] [--no-measuring]
        [--keep FOLDER | --kept FOLDER] [--own-devices] [--only NAME ...]

Models of several shapes (dense F16, Q8_0, Q4_0, experts, and the real one where it is kept) answer on several layouts
each. The layouts of a model take turns, so that what else the machine does hits all of them; the median of the rounds
counts. `--clock cpu` counts the processor's time of all processes in place of the clock's: with one thread each they
work one after another, and what else a busy machine does is left out (so is waiting for the network). Then each answer
in turn is what was learnt, and all other layouts of the model are predicted with it. `noise` is how far single answers
are from their layout's median, in the middle: no prediction can be nearer than that. Prompts are read and compared in
the same way.
`--own-devices` takes what this machine has in place of a lab: with an engine that has Vulkan, and
GGML_VK_VISIBLE_DEVICES=0,0,0, three of Mesa's llvmpipe. `--only` names models, as they are called in the report.
`--keep` keeps what was measured; `--kept` predicts it once more without measuring, as after a change of the prediction.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, cycle, islice
from pathlib import Path
from typing import NamedTuple

import gguf
import msgspec
import numpy as np
import psutil

from benchmarks._children import OurChild, our_child
from engine.base.units import GIB
from engine.devices.device import CPU_ID, Rig
from engine.machines.rigs.discovery import discover
from engine.machines.rigs.lab import LabRig
from engine.machines.rigs.speeds import measured_book, speed_lines
from engine.model.demo.llama_writer import LlamaShape, byte_vocabulary, write_llama
from engine.model.gguf.reader import read_model
from engine.planning.fit.speed_book import EMPTY_BOOK, SpeedBook, read_speed_book, write_speed_book
from engine.planning.layout.layout import Layout, Override, make_layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import plan_prompt, plan_speed
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.answers import MIN_TOKENS
from engine.planning.speed.prediction import LastAnswer, SpeedForecast, anchored
from engine.planning.speed.speeds import Speeds, layout_class
from engine.planning.speed.work import Work
from engine.runtime.plan_requests import load_request
from engine.runtime.protocol.messages import Generated, Hello, LoadedModel, Piece, Reading, StageProgress
from engine.runtime.protocol.requests import Generate

KEPT_MODEL = Path.home() / ".cache/layerdeck/models/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "Tell a long story about a lighthouse keeper, a storm and a ship that nobody expected."
PROMPT_TOKENS = 120
"""What is read for the speed of prompts: as many as make reading the weights once cheap."""
ANSWERS_OF_A_LOAD = 2
CONTEXT = ContextSettings(n_ctx=1024, load_mode="none", threads=1, threads_batch=1)
"""One thread, as workers have: several wait for each other, and on a busy machine for what else runs there."""
SPEEDS, ANSWERS = "speeds.json", "answers.json"
WORTH_TELLING = 1.1
"""Layouts that differ by less than this are alike."""


class Measured(msgspec.Struct):
    """What the answers of a layout took in seconds per token, and how full the context was; the same of prompts."""

    seconds: list[float] = []
    fill_tokens: int = 0
    tokens: int = 0
    prompt_seconds: list[float] = []
    prompt_tokens: int = 0


Kept = dict[str, dict[str, Measured]]
"""By model and layout."""


@dataclass(slots=True)
class Trial:
    """A layout of a model, and what was measured of it."""

    name: str
    plan: Plan
    measured: Measured = field(default_factory=Measured)

    @property
    def token_s(self) -> float:
        return statistics.median(self.measured.seconds)

    @property
    def prompt_token_s(self) -> float:
        return statistics.median(self.measured.prompt_seconds)


def main() -> None:
    """Measure, compare and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--model", type=Path, default=KEPT_MODEL)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--no-measuring", action="store_true")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--own-devices", action="store_true")
    parser.add_argument("--only", nargs="+", default=())
    options = parser.parse_args()
    if options.tokens < MIN_TOKENS:
        parser.error(f"nothing is learnt from answers of less than {MIN_TOKENS} tokens")
    if options.own_devices and options.clock == "cpu":
        parser.error("the processor's time of devices is counted for workers of a lab alone")
    with tempfile.TemporaryDirectory() as folder, devices_of(options.own_devices) as (rig, processes):
        book = EMPTY_BOOK
        if options.kept is not None:
            book = read_speed_book(options.kept / SPEEDS)
        elif not options.no_measuring:
            book, problems = measured_book(rig, book, n_threads=CONTEXT.threads)
            print(*problems, sep="\n", flush=True)
        print(*speed_lines(rig, book), sep="\n", flush=True)
        workers = processes if options.clock == "cpu" else None
        kept = {} if options.kept is None else msgspec.json.decode((options.kept / ANSWERS).read_bytes(), type=Kept)
        groups = []
        for path in models(Path(folder), options.model, options.only):
            trials = layouts_of(path, rig)
            if options.kept is None:
                kept[path.stem] = measure(trials, options.rounds, options.tokens, workers)
            for trial in trials:
                trial.measured = kept[path.stem][trial.name]
            groups.append(trials)
            report_model(path.stem, trials, book)
            if options.keep is not None:
                options.keep.mkdir(parents=True, exist_ok=True)
                write_speed_book(options.keep / SPEEDS, book)
                (options.keep / ANSWERS).write_bytes(msgspec.json.encode(kept))
    result = {"benchmark": "speed_prediction", "rounds": options.rounds, "measured": not options.no_measuring}
    result |= {"clock": options.clock}
    print(json.dumps(result | figures(groups, book)))


@contextmanager
def devices_of(own: bool) -> Iterator[tuple[Rig, list[psutil.Process]]]:
    """Yield this machine's devices, or those of a lab and their processes."""
    if own:
        rig = discover()
        if not rig.devices:
            raise SystemExit("This engine finds no device here besides the processor.")
        yield rig, []
        return
    with LabRig([2 * GIB] * 3) as lab:
        yield lab.rig, [psutil.Process(lab.pid(device.id)) for device in lab.rig.devices]


def measure(
    trials: Sequence[Trial], rounds: int, tokens: int, workers: Sequence[psutil.Process] | None
) -> dict[str, Measured]:
    """Return what the layouts of a model took, by their names."""
    for _ in range(rounds):
        for trial in trials:
            answer(trial, tokens, workers)
    return {trial.name: trial.measured for trial in trials}


def models(folder: Path, real: Path, only: Sequence[str] = ()) -> Iterator[Path]:
    """Yield files of the models (of those named, where any is), those that are generated as they are needed."""
    types = gguf.GGMLQuantizationType
    if real.exists() and (not only or real.stem in only):
        yield real
    for name, shape, of in (
        ("dense_f16", LlamaShape(12, 768, 12, 4, 2048, 4096), types.F16),
        ("wide_q8_0", LlamaShape(6, 1536, 24, 8, 4096, 4096), types.Q8_0),
        ("deep_q4_0", LlamaShape(40, 512, 8, 4, 1536, 4096), types.Q4_0),
        ("experts_f16", LlamaShape(8, 512, 8, 4, 1024, 4096, n_expert=8, n_expert_used=2), types.F16),
        ("middle_q4_0", LlamaShape(20, 1024, 16, 8, 2816, 4096), types.Q4_0),
        ("fine_experts_q8_0", LlamaShape(10, 640, 10, 5, 640, 4096, n_expert=16, n_expert_used=4), types.Q8_0),
    ):
        if not only or name in only:
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
    first, second, third = islice(cycle(device.id for device in rig.devices), 3)
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
        warm = ask(child, PROMPT, 2)
        answers = [ask(child, f"{turn} {PROMPT}", tokens, workers) for turn in range(ANSWERS_OF_A_LOAD)]
        long = " ".join([f"long {PROMPT}"] * (1 + PROMPT_TOKENS // warm.word.prompt_tokens))
        read = ask(child, long, 1, workers)
    measured = trial.measured
    for word, _, generation_s in answers:
        # The first token is there when the processor's clock starts.
        wall_s = word.generation_seconds / word.generated_tokens
        measured.seconds.append(wall_s if workers is None else generation_s / (word.generated_tokens - 1))
        measured.tokens = word.generated_tokens
        measured.fill_tokens = word.prompt_tokens + word.generated_tokens // 2
    measured.prompt_tokens = read.word.evaluated_tokens
    prompt_s = read.word.prompt_seconds if workers is None else read.prompt_s
    measured.prompt_seconds.append(prompt_s / measured.prompt_tokens)


class Said(NamedTuple):
    """An answer's end, and the processor's seconds before its first token and behind it where those are counted."""

    word: Generated
    prompt_s: float
    generation_s: float


def ask(child: OurChild, prompt: str, tokens: int, workers: Sequence[psutil.Process] | None = None) -> Said:
    """Have an answer."""
    processes = [] if workers is None else [*workers, psutil.Process(child.pid)]
    sent_s = processor_s(processes)
    child.send(Generate(id=1, prompt=prompt, max_tokens=tokens, temperature=0.0))
    begun_s = None
    while True:
        match child.message():
            case Generated() as message:
                end_s = processor_s(processes)
                begun_s = end_s if begun_s is None else begun_s
                return Said(message, begun_s - sent_s, end_s - begun_s)
            case Reading() as message:
                # Text may be held back: the first token is there when the whole prompt was read.
                if begun_s is None and message.read_tokens == message.prompt_tokens:
                    begun_s = processor_s(processes)
            case Piece():
                pass
            case message:
                raise RuntimeError(f"no answer: {message}")


def processor_s(processes: Sequence[psutil.Process]) -> float:
    """Return the processor time that the threads of these have had, from Linux's finest clock of it."""
    folders = [Path(f"/proc/{process.pid}/task") for process in processes]
    spent_ns = 0
    for thread in (thread for folder in folders for thread in folder.iterdir()):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            spent_ns += int((thread / "schedstat").read_text().split()[0])
    return spent_ns / 1e9


def predicted(trial: Trial, speeds: Speeds) -> SpeedForecast:
    """Return what is predicted of a trial."""
    found = plan_speed(Work(trial.plan.model), trial.plan, speeds, trial.measured.fill_tokens)
    if found is None:
        raise RuntimeError(f"{trial.name} cannot be planned")
    return found


def predicted_prompt(trial: Trial, speeds: Speeds) -> SpeedForecast:
    """Return what is predicted of a trial's prompt."""
    found = plan_prompt(Work(trial.plan.model), trial.plan, speeds, trial.measured.prompt_tokens)
    if found is None:
        raise RuntimeError(f"{trial.name} cannot be planned")
    return found


def learnt(book: SpeedBook, trial: Trial) -> SpeedBook:
    """Return the book after an answer on a trial's layout."""
    rig, layout = trial.plan.rig, trial.plan.edit.layout
    speeds, name = book.speeds(rig).unlearnt, layout_class(layout, rig)
    book = book.with_answer(name, rig, predicted(trial, speeds), trial.measured.tokens, 1 / trial.token_s)
    return book.with_prompt(name, rig, predicted_prompt(trial, speeds), 1 / trial.prompt_token_s)


def after_answer(book: SpeedBook, taught: Trial) -> Callable[[Trial], tuple[SpeedForecast, SpeedForecast]]:
    """Return a function that predicts (the answers, the prompt) of a trial after an answer on the layout of `taught`.

    As in the window: the answer is learnt, and predictions of the same model are in proportion to it.
    """
    speeds = learnt(book, taught).speeds(taught.plan.rig)
    there, read = predicted(taught, speeds), predicted_prompt(taught, speeds)
    answer = LastAnswer(1 / taught.token_s, there.n_tokens)
    prompt = LastAnswer(1 / taught.prompt_token_s, read.n_tokens)

    def predict(trial: Trial) -> tuple[SpeedForecast, SpeedForecast]:
        return anchored(predicted(trial, speeds), there, answer), anchored(
            predicted_prompt(trial, speeds), read, prompt
        )

    return predict


def report_model(name: str, trials: Sequence[Trial], book: SpeedBook) -> None:
    """Print what was measured and predicted of a model."""
    rig = trials[0].plan.rig
    after = after_answer(book, trials[2])
    for trial in trials:
        before = predicted(trial, book.speeds(rig))
        parts = ", ".join(f"{each.id} {each.seconds * 1e3:.1f}" for each in before.devices)
        print(
            f"{name}, {trial.name}: {trial.token_s * 1e3:.1f} ms a token ({noise([trial]):.0%} noise), predicted "
            f"{before.token_s * 1e3:.1f} ({parts}), after an answer {after(trial)[0].token_s * 1e3:.1f}",
            flush=True,
        )


def figures(groups: Sequence[Sequence[Trial]], book: SpeedBook) -> dict[str, object]:
    """Return errors and orders before any answer, and after one of each layout in turn."""
    errors, after, ranks, ranks_after, pairs = [], [], [], [], 0
    prompts, prompts_after = [], []
    for trials in groups:
        speeds = book.speeds(trials[0].plan.rig)
        before = [predicted(trial, speeds).token_s for trial in trials]
        errors += [abs(found / trial.token_s - 1) for found, trial in zip(before, trials, strict=True)]
        ranks += order_hits(trials, before)
        pairs += len(order_hits(trials, before))
        prompts += [prompt_error(trial, speeds) for trial in trials]
        for taught in trials:
            predict = after_answer(book, taught)
            both = [predict(trial) for trial in trials]
            found = [answer.token_s for answer, _ in both]
            after += [
                abs(each / trial.token_s - 1) for each, trial in zip(found, trials, strict=True) if trial is not taught
            ]
            ranks_after += order_hits(trials, found)
            prompts_after += [
                abs(prompt.token_s / trial.prompt_token_s - 1)
                for (_, prompt), trial in zip(both, trials, strict=True)
                if trial is not taught
            ]
    return {
        "layouts": sum(map(len, groups)),
        "pairs": pairs,
        "noise": round(noise([trial for trials in groups for trial in trials]), 3),
        "median_error_before": round(statistics.median(errors), 3),
        "median_error": round(statistics.median(after), 3),
        "error_90": round(statistics.quantiles(after, n=10)[-1], 3),
        "right_before": round(statistics.mean(ranks), 3),
        "right": round(statistics.mean(ranks_after), 3),
        "prompt_error_before": round(statistics.median(prompts), 3),
        "prompt_error": round(statistics.median(prompts_after), 3),
    }


def prompt_error(trial: Trial, speeds: Speeds) -> float:
    """Return how far the prediction of a trial's prompt is off, as a part."""
    return abs(predicted_prompt(trial, speeds).token_s / trial.prompt_token_s - 1)


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
    return statistics.median(abs(each / trial.token_s - 1) for trial in trials for each in trial.measured.seconds)


if __name__ == "__main__":
    main()
