"""Results of a benchmark: the format of the file, and the comparisons that are computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
from msgspec import Struct

from engine.base.errors import ArgumentError
from engine.base.files import read_at_most
from engine.base.json_file import UNREADABLE, encode_document, write_file
from engine.base.language import tr
from engine.base.texts import shorten
from engine.base.units import format_bytes
from engine.base.values import replace
from engine.machines.bench.statistics import Ratio, median_interval, ratio_of
from engine.planning.layout.layout_file import LayoutFile, parse_layout

FORMAT = "layerdeck-bench"
VERSION = 1
MAX_FILE_BYTES = 16 << 20
MAX_SAMPLES = 10_000
"""Largest number of samples and loads of all layouts together in a results file. More would make the computation of
confidence intervals slow.
"""
MAX_DEPTHS = 200
"""Largest sum of the number of layouts in a results file and the numbers of measured depths of these layouts.

A depth is a number of tokens in the context before the prompt.
"""
_LEAST, _MOST = 1e-9, 1e15
"""Bounds of plausible speeds and times in a results file; values beyond them could cause a division by zero."""
Measure = Literal["prompt", "generation", "first_token", "load", "answer"]
"""What is measured: "prompt" and "generation" are speeds, "first_token", "load" and "answer" are times.

"first_token" is the time to the first token, "answer" the time of prompt and answer together.
"""
RATES: tuple[Measure, ...] = ("prompt", "generation")
"""Measures in tokens per second. All other measures are in seconds."""


class Preset(Struct, frozen=True):
    """What a benchmark measures. Lengths are in tokens.

    `name`: name of the option or menu entry, such as `quick`.
    `n_rounds`: number of rounds. In each round, every layout is measured once.
    `depths`: numbers of tokens in the context before the prompt; `FULL` (-1) for as many as fit into the context.
    """

    name: str
    n_rounds: int
    prompt_tokens: int
    answer_tokens: int
    depths: tuple[int, ...] = (0,)


FULL = -1
PRESETS = {
    each.name: each
    for each in (
        Preset("quick", 5, 256, 32),
        # As many tokens as in llama-bench's defaults.
        Preset("normal", 7, 512, 128),
        Preset("long", 7, 512, 128, (0, 4096, 16384, FULL)),
    )
}


class Sample(Struct, frozen=True, kw_only=True):
    """The measured speeds of one answer. A speed or time is None if it could not be measured.

    `round`: number of the round.
    `depth`: number of tokens in the context before the prompt.
    `prompt_tokens`: number of computed prompt tokens, without those from the KV cache.
    `other_load`: share of the processors, 0 to 1, that other programs used.
    """

    round: int
    depth: int
    prompt_tokens: int
    answer_tokens: int
    prompt_per_second: float | None
    answer_per_second: float | None
    first_token_s: float | None
    other_load: float | None = None


class TimedLoad(Struct, frozen=True):
    """The time of one load of a layout. `round`: number of the round in which it was loaded."""

    round: int
    seconds: float


class DeviceMemory(Struct, frozen=True):
    """Memory of a device with a loaded layout; each value is None if it is unknown.

    `forecast_bytes`: bytes by the forecast.
    `measured_bytes`: bytes of the buffers after the load.
    `peak_bytes`: highest reading of the memory of our processes.
    """

    device: str
    forecast_bytes: int | None
    measured_bytes: int | None
    peak_bytes: int | None = None


class DeviceState(Struct, frozen=True, kw_only=True):
    """State of a device during answers. A field is None if the device does not report it.

    `clock_mhz`, `power_w`: medians of the readings.
    `temperature_c`: highest reading.
    `joules_per_token`: energy per generated token.
    `throttled`: reasons why the driver lowered the clocks, empty if it did not.
    """

    device: str
    clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    joules_per_token: float | None = None
    throttled: str = ""


class Measured(Struct, frozen=True, kw_only=True):
    """A layout with its measured speeds.

    `layout`: content of a layout file.
    `reason`: why the layout was tried.
    `against`: name of the layout with which it is compared; empty for the first layout.
    `predicted_per_second`: generation speed that was predicted before the measurement, in tokens per second.
    `loads`: durations of its loads.
    `memory`, `devices`: memory and state of each device.
    `answers`: texts of the greedy answers, by the number of the round.
    `problem`: sentence that says why there are no further samples, else empty.
    `problem_kind`: kind of the problem by `docs/contract.md`, such as `does_not_fit`.
    """

    name: str
    layout: dict[str, Any]
    reason: str = ""
    against: str = ""
    predicted_per_second: float | None = None
    samples: tuple[Sample, ...] = ()
    loads: tuple[TimedLoad, ...] = ()
    memory: tuple[DeviceMemory, ...] = ()
    devices: tuple[DeviceState, ...] = ()
    answers: dict[str, str] = {}
    problem: str = ""
    problem_kind: str = ""

    def values(self, measure: Measure, depth: int = 0) -> dict[int, float]:
        """Return the values of a measure by the number of the round, in tokens per second or seconds.

        `depth`: number of tokens in the context before the prompt.
        """
        if measure == "load":
            return {each.round: each.seconds for each in self.loads} if depth == 0 else {}
        found: dict[int, float] = {}
        for each in self.samples:
            value = value_of(each, measure)
            if each.depth == depth and value is not None and value > 0:
                found[each.round] = value
        return found

    def middle(self, measure: Measure, depth: int = 0) -> float | None:
        """Return the median of a measure over the rounds; None if it was not measured.

        `depth`: number of tokens in the context before the prompt.
        """
        values = self.values(measure, depth)
        return median(values.values()) if values else None

    def interval(self, measure: Measure, depth: int = 0) -> tuple[float, float] | None:
        """Return the confidence interval of a measure's median (95 %); None if there are too few rounds.

        `depth`: number of tokens in the context before the prompt.
        """
        return median_interval(tuple(self.values(measure, depth).values()))

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths (tokens before the prompt) with samples, sorted."""
        return tuple(sorted({each.depth for each in self.samples}))

    @property
    def other_load(self) -> float | None:
        """Median share of the processors, 0 to 1, that other programs used; None if unknown."""
        shares = [each.other_load for each in self.samples if each.other_load is not None]
        return median(shares) if shares else None


def value_of(sample: Sample, measure: Measure) -> float | None:
    """Return one measure of a sample: tokens per second, or seconds; None if it was not measured."""
    match measure:
        case "prompt":
            return sample.prompt_per_second
        case "generation":
            return sample.answer_per_second
        case "first_token":
            return sample.first_token_s
        case "answer" if sample.prompt_per_second and sample.answer_per_second:
            return sample.prompt_tokens / sample.prompt_per_second + sample.answer_tokens / sample.answer_per_second
    return None


class Comparison(Struct, frozen=True, kw_only=True):
    """Comparison of one measure of two layouts.

    `base`, `name`: names of the layouts.
    `depth`: number of tokens in the context before the prompt.
    `ratio`: how many times as fast `name` is as `base`.
    `low`, `high`: confidence interval of the ratio (95 %), None if there are too few rounds.
    `verdict`: `faster`, `slower`, `same` (no difference seen) or `open` (too few rounds).
    """

    base: str
    name: str
    measure: Measure
    depth: int
    ratio: float
    low: float | None
    high: float | None
    n_rounds: int
    verdict: Literal["faster", "slower", "same", "open"]


class AnswerCheck(Struct, frozen=True):
    """Whether two layouts gave the same greedy answers.

    `base`, `name`: names of the layouts.
    `sentence`: describes the first difference, empty if there is none.
    """

    base: str
    name: str
    same: bool
    sentence: str = ""


class MachineDevice(Struct, frozen=True):
    """A device of the machine on which the benchmark ran.

    `name`: name of the hardware; empty for RPC workers, because their names may contain a computer's name.
    """

    id: str
    name: str
    backend: str
    total_bytes: int


class BenchMachine(Struct, frozen=True):
    """The machine of a benchmark, without data that identifies its owner.

    `n_cores`: number of threads that the engine computes with by default.
    """

    system: str
    processor: str
    n_cores: int
    memory_bytes: int
    devices: tuple[MachineDevice, ...] = ()


class BenchModel(Struct, frozen=True):
    """The model of a benchmark, without its path."""

    name: str
    architecture: str
    size_bytes: int
    n_layers: int


class BenchResults(Struct, frozen=True, kw_only=True):
    """All results of a benchmark: the content of a results file. The first layout is the base of the comparisons.

    `layerdeck`, `engine`: versions of Layerdeck and of the engine.
    `made_s`: time of the benchmark in seconds since 1970.
    `answers`: comparisons of the greedy answers.
    `notes`: sentences about events during the benchmark.
    `ended`: sentence that says why it ended early, else empty.
    `winner`: name of the layout with the shortest time of a whole answer, empty if none was measured.
    """

    format: str = FORMAT
    version: int = VERSION
    layerdeck: str
    engine: str
    made_s: int
    machine: BenchMachine
    model: BenchModel
    preset: Preset
    layouts: tuple[Measured, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    answers: tuple[AnswerCheck, ...] = ()
    notes: tuple[str, ...] = ()
    ended: str = ""
    winner: str = ""

    def layout(self, name: str) -> Measured | None:
        """Return the results of the layout with this name; None if there is none."""
        return next((each for each in self.layouts if each.name == name), None)


# ------------------------------------------------------------------ comparisons


def compare(base: Measured, other: Measured, measure: Measure, depth: int = 0) -> Comparison | None:
    """Return the comparison of one measure of two layouts; None if they have no round in common.

    The values of each common round are paired. Loads are paired in their order, because in a round only one of the
    two layouts may have been loaded.

    `depth`: number of tokens in the context before the prompt.
    """
    ours, theirs = base.values(measure, depth), other.values(measure, depth)
    rounds = sorted(ours.keys() & theirs.keys())
    # In a round only one of two layouts may have been loaded, so loads are paired in their order and not by round.
    pairs = [(ours[each], theirs[each]) for each in rounds]
    if measure == "load" and ours and theirs:
        pairs = list(zip(ours.values(), theirs.values(), strict=False))
    if measure not in RATES:
        # Times are inverted, because a shorter time is faster.
        pairs = [(1 / mine, 1 / its) for mine, its in pairs]
    found = ratio_of(pairs)
    if found is None:
        return None
    return Comparison(
        base=base.name,
        name=other.name,
        measure=measure,
        depth=depth,
        ratio=found.value,
        low=found.low,
        high=found.high,
        n_rounds=found.n_rounds,
        verdict=_verdict(found),
    )


def _verdict(ratio: Ratio) -> Literal["faster", "slower", "same", "open"]:
    if not ratio.has_interval:
        return "open"
    if not ratio.differs:
        return "same"
    return "faster" if ratio.value > 1 else "slower"


def compare_all(base: Measured, other: Measured) -> tuple[Comparison, ...]:
    """Compare two layouts by load time, and by each other measure at each depth that both layouts have.

    The depth is the number of tokens in the context before the prompt.
    """
    depths = sorted({*base.depths} & {*other.depths})
    measures: tuple[Measure, ...] = ("prompt", "generation", "first_token", "answer")
    asked = [(measure, depth) for depth in depths for measure in measures]
    found = (compare(base, other, measure, depth) for measure, depth in (*asked, ("load", 0)))
    return tuple(each for each in found if each is not None)


def check_answers(base: Measured, other: Measured) -> AnswerCheck | None:
    """Compare the greedy answers of two layouts to the same prompts; None if they had no prompt in common."""
    common = [key for key in base.answers if key in other.answers]
    if not common:
        return None
    for key in common:
        mine, its = base.answers[key], other.answers[key]
        if mine != its:
            return AnswerCheck(base.name, other.name, False, _difference(base.name, mine, other.name, its))
    return AnswerCheck(base.name, other.name, True)


_SHOWN = 24
"""Number of characters of each answer that are quoted at the first difference."""


def _difference(base: str, mine: str, name: str, its: str) -> str:
    at = next(
        (at for at, pair in enumerate(zip(mine, its, strict=False)) if pair[0] != pair[1]), min(map(len, (mine, its)))
    )
    return tr(
        'The greedy answers differ from character {position} on: "{base_text}" with {base}, "{text}" with {name}. '
        "Other devices and batches round differently, so a difference alone is not a fault.",
        position=at + 1,
        base_text=mine[at : at + _SHOWN],
        base=base,
        text=its[at : at + _SHOWN],
        name=name,
    )


def with_comparisons(results: BenchResults) -> BenchResults:
    """Return the results with their comparisons and the winner computed.

    Each layout is compared with the layout that `Measured.against` names. The two were measured alternately.
    """
    pairs = [
        (base, each) for each in results.layouts if each.against and (base := results.layout(each.against)) is not None
    ]
    return replace(
        results,
        comparisons=tuple(found for base, other in pairs for found in compare_all(base, other)),
        answers=tuple(found for base, other in pairs if (found := check_answers(base, other)) is not None),
        winner=winner_of(results.layouts),
    )


def winner_of(layouts: Sequence[Measured]) -> str:
    """Return the name of the layout with the shortest time of a whole answer; empty if none was measured.

    The layouts are compared in order. A later layout replaces the best one so far only if it was measured to be faster
    than that one (`faster`), not if the difference is within the uncertainty of the measurement.
    """
    measured = [each for each in layouts if each.middle("answer") is not None]
    if not measured:
        return ""
    best, *others = measured
    for each in others:
        found = compare(best, each, "answer")
        if found is not None and found.verdict == "faster":
            best = each
    return best.name


# ------------------------------------------------------------------ files


def write_results(path: Path, results: BenchResults) -> None:
    """Write the results of a benchmark to a JSON file, atomically.

    Raises:
        ArgumentError: the file cannot be written.
    """
    write_file(path, encode_document(msgspec.to_builtins(results)), what=tr("results"), fail=_fail)


def read_results(path: Path) -> BenchResults:
    """Return the results of a benchmark from a file.

    Raises:
        ArgumentError: if the file cannot be read, is no file of results, or has another version.
    """
    try:
        data = read_at_most(path, MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise ArgumentError(tr("{name} cannot be read: {error}.", name=path.name, error=error)) from None
    return parse_results(data, path.name)


class _Head(Struct):
    format: str = ""
    version: int = 0


def parse_results(data: bytes, name: str) -> BenchResults:
    """Return the results of a benchmark from `data`, the content of a file called `name`.

    Raises:
        ArgumentError: if `data` has no results of a benchmark, is damaged, or has another version.
    """
    # The head alone first: another version may have any other keys.
    try:
        head = msgspec.json.decode(data, type=_Head)
    except UNREADABLE:
        head = _Head()
    if head.format != FORMAT:
        raise ArgumentError(
            tr(
                "{name} has no results of a speed comparison; choose a file that was written by Export… or by "
                "layerdeck-cli bench --out.",
                name=name,
            )
        )
    if head.version != VERSION:
        raise ArgumentError(
            tr(
                "{name} has results of version {version}, but this program reads version {own_version}. Export the "
                "results again with the same version of Layerdeck.",
                name=name,
                version=head.version,
                own_version=VERSION,
            )
        )
    try:
        results = msgspec.json.decode(data, type=BenchResults)
    except UNREADABLE as error:
        raise ArgumentError(tr("{name} is damaged: {error}.", name=name, error=error)) from None
    if fault := _fault_of(results):
        raise ArgumentError(tr("{name} is damaged: {error}.", name=name, error=fault))
    return with_comparisons(results)


def _fault_of(results: BenchResults) -> str:
    """Return why results from a file are impossible, such as a negative speed; empty if no fault was found."""
    if sum(len(each.samples) + len(each.loads) for each in results.layouts) > MAX_SAMPLES:
        return tr("the file has more than {most} measurements", most=MAX_SAMPLES)
    if len(results.layouts) + sum(len(each.depths) for each in results.layouts) > MAX_DEPTHS:
        return tr("the file has more than {most} combinations of layout and context depth", most=MAX_DEPTHS)
    for layout in results.layouts:
        for each in layout.samples:
            values = (each.prompt_per_second, each.answer_per_second, each.first_token_s)
            counts = (each.prompt_tokens, each.answer_tokens, each.depth)
            if any(value and not _LEAST <= value <= _MOST for value in values) or not all(
                0 <= count <= _MOST for count in counts
            ):
                return tr(
                    "a measurement of the layout {layout} contains an impossible number",
                    layout=shorten(layout.name, 60),
                )
        if any(not _LEAST <= each.seconds <= _MOST for each in layout.loads):
            return tr("a load time of the layout {layout} is impossible", layout=shorten(layout.name, 60))
    return ""


def layout_of(measured: Measured, n_layers: int | None = None) -> LayoutFile:
    """Return the layout file with the layout and settings that were measured.

    `n_layers`: number of layers that the layout must have, None for any number.

    Raises:
        LayoutError: if the layout is invalid.
    """
    return parse_layout(msgspec.json.encode(measured.layout), source=measured.name, n_layers=n_layers)


def import_note(ours: BenchModel, theirs: BenchModel) -> str:
    """Return a sentence that says that imported results are of another model; empty if they are of the same model."""
    if (ours.name, ours.size_bytes, ours.n_layers) == (theirs.name, theirs.size_bytes, theirs.n_layers):
        return ""
    return tr(
        "These results are for {measured_model} ({measured_size}), but {open_model} ({open_size}) is open: the speeds "
        "are not comparable.",
        measured_model=theirs.name,
        measured_size=format_bytes(theirs.size_bytes),
        open_model=ours.name,
        open_size=format_bytes(ours.size_bytes),
    )


def _fail(reason: str, *, location: str = "", source: str = "") -> ArgumentError:
    return ArgumentError(": ".join(filter(None, (source, location, f"{reason}."))))
