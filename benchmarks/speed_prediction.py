"""Error of the predicted speeds: predictions against measured answers, on the host and on lab workers.

    python -m benchmarks.speed_prediction [--rounds 3] [--tokens 32] [--model FILE.gguf] [--no-measuring]
        [--clock wall|cpu] [--keep FOLDER | --kept FOLDER] [--own-devices] [--only NAME ...]

Models of several shapes (`_shapes.py`), and the demo model if it is there, answer on several layouts each. Measured are
seconds per token of answers and prompts: after a short prompt, and after one of several micro batches (`deep`). The
layouts of a model take turns, so that other load on the machine affects all of them; the median of the rounds counts.

Each layout is predicted before any answer. Then, for each layout, its answer is learnt, and all other layouts of the
model are predicted. Printed are relative errors (median and 90 % quantile), and the share of pairs of layouts that were
predicted in the right order (`right_before`, `right`). `noise` is the median distance of single answers from the median
of their layout; errors cannot be below it. Models on which constants were fitted (`fitted`) and others (`held_out`) are
counted separately.

`--clock cpu`: processor time of all processes instead of the wall clock. Other load on the machine then changes little,
but waiting for the network is not included.
`--own-devices`: the devices of this machine instead of a lab rig. With an engine that has Vulkan,
GGML_VK_VISIBLE_DEVICES=0,0,0 makes three devices of Mesa's llvmpipe.
`--only`: the models with these names.
`--keep`, `--kept`: write the measurements to a folder; or predict those of a folder again without measuring.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations, cycle, islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
from msgspec import Struct, field

from benchmarks._children import OurChild, our_child
from benchmarks._shapes import FITTED, HELD_OUT, write_shape
from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig
from engine.machines.rigs.discovery import discover
from engine.machines.rigs.lab import LabRig
from engine.machines.rigs.speeds import measured_book, speed_lines
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
from engine.planning.speed.work import TokenWork
from engine.runtime.plan_requests import load_request
from engine.runtime.protocol.messages import Generated, Hello, LoadedModel, Piece, Reading, StageProgress
from engine.runtime.protocol.requests import Generate

KEPT_MODEL = Path.home() / ".cache/layerdeck/models/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "Tell a long story about a lighthouse keeper, a storm and a ship that nobody expected."
PROMPT_TOKENS = 120
"""Tokens of the prompt whose speed is measured, enough that reading the weights once does not matter."""
DEEP_TOKENS, DEEP_ANSWER = 800, 12
"""Tokens of a prompt of several micro batches, and of the answer to it, for the cost of attention to many tokens."""
ANSWERS_OF_A_LOAD = 2
CONTEXT = ContextSettings(n_ctx=1024, load_mode="none", threads=1, threads_batch=1)
"""One thread, as lab workers have. More threads would wait for each other, and for other programs on a busy machine."""
SPEEDS, ANSWERS = "speeds.json", "answers.json"
WORTH_TELLING = 1.1
"""Ratio of seconds per token above which two layouts count as different."""


class Measured(msgspec.Struct):
    """Seconds per token of the answers and prompts on one layout, an item for each measurement.

    `fill_tokens`: tokens in the context in the middle of an answer.
    `tokens`: tokens of an answer.
    `prompt_tokens`: tokens of the prompt that were evaluated.
    `deep_...`: the same for a long prompt, and for the answer to it.
    """

    seconds: list[float] = []
    fill_tokens: int = 0
    tokens: int = 0
    prompt_seconds: list[float] = []
    prompt_tokens: int = 0
    deep_seconds: list[float] = []
    deep_fill_tokens: int = 0
    deep_prompt_seconds: list[float] = []
    deep_prompt_tokens: int = 0


Kept = dict[str, dict[str, Measured]]
"""Measurements by model, then by layout."""


class Trial(Struct):
    """A layout of a model, with its measurements."""

    name: str
    plan: Plan
    measured: Measured = field(default_factory=Measured)

    @property
    def token_s(self) -> float:
        return statistics.median(self.measured.seconds)


def main() -> None:
    """Measure, predict and print the errors."""
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
    fitted, held_out = ([trials for trials in groups if is_held_out(trials) == is_held] for is_held in (False, True))
    if fitted:
        result["fitted"] = figures(fitted, book)
    if held_out:
        result["held_out"] = figures(held_out, book)
    print(json.dumps(result))


def is_held_out(trials: Sequence[Trial]) -> bool:
    """Return whether no constant was fitted on the model of these trials."""
    return trials[0].plan.model.name in HELD_OUT


@contextmanager
def devices_of(own: bool) -> Iterator[tuple[Rig, list[psutil.Process]]]:
    """Yield a rig and the processes of its workers: this machine's devices (`own`, no processes), or a lab rig."""
    if own:
        rig = discover()
        if not rig.devices:
            raise SystemExit("This engine finds no device here besides the processor.")
        yield rig, []
        return
    with LabRig([2 * GIB] * 2) as lab:
        yield lab.rig, [psutil.Process(lab.pid(device.id)) for device in lab.rig.devices]


def measure(
    trials: Sequence[Trial], rounds: int, tokens: int, workers: Sequence[psutil.Process] | None
) -> dict[str, Measured]:
    """Measure all layouts of a model in turns; return the measurements by the layouts' names.

    `workers`: processes whose processor time is counted; None: the wall clock.
    """
    for _ in range(rounds):
        for trial in trials:
            answer(trial, tokens, workers)
    return {trial.name: trial.measured for trial in trials}


def models(folder: Path, real: Path, only: Sequence[str] = ()) -> Iterator[Path]:
    """Yield model files: the real one if it exists, and generated ones, each deleted after its use.

    `only`: names of the models to use; empty for all.
    """
    if real.exists() and (not only or real.stem in only):
        yield real
    for name, (shape, matrix_type) in {**FITTED, **HELD_OUT}.items():
        if not only or name in only:
            path = write_shape(folder / f"{name}.gguf", shape, matrix_type)
            yield path
            path.unlink()


def layouts_of(path: Path, rig: Rig) -> list[Trial]:
    """Return trials on layouts from one device to many alternating runs."""
    memory = ModelMemory(read_model(path))
    n = memory.model.n_layers
    first, second = islice(cycle(device.id for device in rig.devices), 2)
    places = {
        "host": [CPU_ID] * n,
        "worker": [first] * n,
        "host and worker": [CPU_ID] * (n // 2) + [first] * (n - n // 2),
        "two workers": [first] * (n // 2) + [second] * (n - n // 2),
        "a quarter on the host": [CPU_ID] * (n // 4) + [first] * (n - n // 4),
        "turns": [(CPU_ID, first)[index // max(1, n // 6) % 2] for index in range(n)],
    }
    layouts: dict[str, Layout] = {name: make_layout(n, assigned) for name, assigned in places.items()}
    if any(block.expert_bytes for block in memory.model.blocks):
        layouts["experts on the host"] = replace(layouts["worker"], overrides=(Override(CPU_ID, part="experts"),))
    return [Trial(name, Plan(memory, rig, Edit(layout, CONTEXT))) for name, layout in layouts.items()]


def answer(trial: Trial, tokens: int, workers: Sequence[psutil.Process] | None = None) -> None:
    """Load the layout of a trial, warm up, measure answers and prompts, and unload.

    `workers`: processes whose processor time is counted, with that of the model child; None: the wall clock.
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
        deep = " ".join([f"deep {PROMPT}"] * round(DEEP_TOKENS / warm.word.prompt_tokens))
        far = ask(child, deep, DEEP_ANSWER, workers)
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
    wall_s = far.word.generation_seconds / far.word.generated_tokens
    measured.deep_seconds.append(wall_s if workers is None else far.generation_s / (far.word.generated_tokens - 1))
    measured.deep_fill_tokens = far.word.prompt_tokens + far.word.generated_tokens // 2
    measured.deep_prompt_tokens = far.word.evaluated_tokens
    prompt_s = far.word.prompt_seconds if workers is None else far.prompt_s
    measured.deep_prompt_seconds.append(prompt_s / measured.deep_prompt_tokens)


class Said(NamedTuple):
    """The final message of an answer, with processor seconds before and after its first token.

    The seconds are 0 if no processor time is counted.
    """

    word: Generated
    prompt_s: float
    generation_s: float


def ask(child: OurChild, prompt: str, tokens: int, workers: Sequence[psutil.Process] | None = None) -> Said:
    """Send a prompt, and wait for the end of its answer. `workers`: processes whose processor time is counted too."""
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
    """Return the processor seconds of all threads of these processes, from Linux's `schedstat` (nanoseconds)."""
    folders = [Path(f"/proc/{process.pid}/task") for process in processes]
    spent_ns = 0
    for thread in (thread for folder in folders for thread in folder.iterdir()):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            spent_ns += int((thread / "schedstat").read_text().split()[0])
    return spent_ns / 1e9


def predicted(trial: Trial, speeds: Speeds, *, deep: bool = False) -> SpeedForecast:
    """Return the predicted speed of a trial's answer. `deep`: the one after the long prompt."""
    measured = trial.measured
    fill_tokens = measured.deep_fill_tokens if deep else measured.fill_tokens
    found = plan_speed(TokenWork(trial.plan.model), trial.plan, speeds, fill_tokens)
    if found is None:
        raise RuntimeError(f"{trial.name} cannot be planned")
    return found


def predicted_prompt(trial: Trial, speeds: Speeds, *, deep: bool = True) -> SpeedForecast:
    """Return the predicted speed of a trial's prompt. `deep`: the long one."""
    measured = trial.measured
    n_tokens = measured.deep_prompt_tokens if deep else measured.prompt_tokens
    found = plan_prompt(TokenWork(trial.plan.model), trial.plan, speeds, n_tokens)
    if found is None:
        raise RuntimeError(f"{trial.name} cannot be planned")
    return found


def learnt(book: SpeedBook, trial: Trial) -> SpeedBook:
    """Return the speed book after it has learnt a trial's answer and long prompt."""
    rig, layout = trial.plan.rig, trial.plan.edit.layout
    speeds, name = book.speeds(rig).unlearnt, layout_class(layout, rig)
    book = book.with_answer(name, rig, predicted(trial, speeds), trial.measured.tokens, 1 / trial.token_s)
    return book.with_prompt(name, rig, predicted_prompt(trial, speeds), 1 / measured_s(trial, "deep prompt"))


KINDS = ("answer", "deep answer", "prompt", "deep prompt")


def measured_s(trial: Trial, kind: str) -> float:
    """Return the measured seconds per token: the median of a trial's rounds. `kind`: one of `KINDS`."""
    measured = trial.measured
    return statistics.median(
        {
            "answer": measured.seconds,
            "deep answer": measured.deep_seconds,
            "prompt": measured.prompt_seconds,
            "deep prompt": measured.deep_prompt_seconds,
        }[kind]
    )


def predict(trial: Trial, kind: str, speeds: Speeds) -> SpeedForecast:
    """Return the predicted speed of a trial. `kind`: one of `KINDS`."""
    make = predicted_prompt if kind.endswith("prompt") else predicted
    return make(trial, speeds, deep=kind.startswith("deep"))


def after_answer(book: SpeedBook, taught: Trial) -> Callable[[Trial, str], float]:
    """Return a function that predicts seconds per token after one answer on the layout of `taught`.

    As in the window, answer and long prompt are learnt, and predictions for the same model are scaled by their errors.
    The arguments of the function are a trial and one of `KINDS`.
    """
    speeds = learnt(book, taught).speeds(taught.plan.rig)

    def found(trial: Trial, kind: str) -> float:
        like = "deep prompt" if kind.endswith("prompt") else "answer"
        there = predict(taught, like, speeds)
        answer = LastAnswer(1 / measured_s(taught, like), there.n_tokens)
        return anchored(predict(trial, kind, speeds), there, answer).token_s

    return found


def report_model(name: str, trials: Sequence[Trial], book: SpeedBook) -> None:
    """Print measured and predicted seconds per token of a model's layouts."""
    rig = trials[0].plan.rig
    after = after_answer(book, trials[2])
    for trial in trials:
        before = predicted(trial, book.speeds(rig))
        parts = ", ".join(f"{each.id} {each.seconds * 1e3:.1f}" for each in before.devices)
        print(
            f"{name}, {trial.name}: {trial.token_s * 1e3:.1f} ms a token ({noise([trial]):.0%} noise), predicted "
            f"{before.token_s * 1e3:.1f} ({parts}), after an answer {after(trial, 'answer') * 1e3:.1f}",
            flush=True,
        )


def figures(groups: Sequence[Sequence[Trial]], book: SpeedBook) -> dict[str, object]:
    """Return errors and shares of right orders, before any answer and after one answer on each layout in turn."""
    before: dict[str, list[float]] = {kind: [] for kind in KINDS}
    after: dict[str, list[float]] = {kind: [] for kind in KINDS}
    ranks, ranks_after = [], []
    for trials in groups:
        speeds = book.speeds(trials[0].plan.rig)
        for kind in KINDS:
            before[kind] += [abs(predict(each, kind, speeds).token_s / measured_s(each, kind) - 1) for each in trials]
        ranks += order_hits(trials, [predict(each, "answer", speeds).token_s for each in trials])
        for taught in trials:
            found = after_answer(book, taught)
            others = [each for each in trials if each is not taught]
            for kind in KINDS:
                after[kind] += [abs(found(each, kind) / measured_s(each, kind) - 1) for each in others]
            ranks_after += order_hits(trials, [found(each, "answer") for each in trials])
    return {
        "layouts": sum(map(len, groups)),
        "pairs": len(ranks),
        "noise": round(noise([trial for trials in groups for trial in trials]), 3),
        "right_before": round(statistics.mean(ranks), 3),
        "right": round(statistics.mean(ranks_after), 3),
        "median_error_before": {kind: round(statistics.median(each), 3) for kind, each in before.items()},
        "median_error": {kind: round(statistics.median(each), 3) for kind, each in after.items()},
        "error_90": {kind: round(statistics.quantiles(each, n=10)[-1], 3) for kind, each in after.items()},
    }


def order_hits(trials: Sequence[Trial], found: Sequence[float]) -> list[bool]:
    """Return for each pair of different layouts whether the faster one was predicted to be faster.

    `found`: predicted seconds per token of the trials.
    """
    times = [trial.token_s for trial in trials]
    return [
        (found[one] < found[other]) == (times[one] < times[other])
        for one, other in combinations(range(len(trials)), 2)
        if max(times[one], times[other]) > WORTH_TELLING * min(times[one], times[other])
    ]


def noise(trials: Sequence[Trial]) -> float:
    """Return the median relative distance of single answers from the median of their layout."""
    return statistics.median(abs(each / trial.token_s - 1) for trial in trials for each in trial.measured.seconds)


if __name__ == "__main__":
    main()
