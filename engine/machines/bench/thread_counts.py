"""Measures which number of threads makes this computer's CPU fastest, for answers and for prompts.

The measured computation is a matrix product (`engine.runtime.child.load.speed.measure_threads`). All numbers of threads
are measured in turns in one child process. Then a second child binds its threads to physical cores, and both children
are measured in turns with the best number, to find whether bound threads are faster.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from msgspec import Struct

from engine.base.errors import BusyError, EngineError
from engine.base.language import tr
from engine.base.processor import Processor, core_cpus, own_processor, usable_processors
from engine.base.units import MIB
from engine.devices.device import Device, MeasuredChoice
from engine.machines.bench.readings import load_share, processor_seconds
from engine.machines.bench.statistics import MIN_ROUNDS, Ratio, ratio_of, turn_order
from engine.planning.fit.speed_book import SpeedBook, machine_key
from engine.planning.plan.decisions.decision import BOUND_THREADS, gain_text
from engine.planning.settings.table import MAX_THREADS
from engine.runtime.plan_requests import bound_threads
from engine.runtime.process.blocking_child import BlockingChild
from engine.runtime.protocol.messages import ThreadSpeeds
from engine.runtime.protocol.requests import MeasureThreads

ROUNDS = MIN_ROUNDS + 2
MIN_GAIN = 1.03
"""Least factor by which another number of threads must be faster than the default number to be preferred to it."""
_MANY_CORES = 16
"""Least number of cores for which a quarter of the cores is tried too: so few threads may already use all memory
bandwidth.
"""
_SIZE_BYTES = 128 * MIB
"""Size of the matrix whose product is timed: larger than most caches."""
_PART = 8
"""Divisor of the host's free memory: the matrix of the measurement takes at most 1/8 of it."""
_MEASURED_S = 0.05
BUSY_SHARE = 0.1
"""Largest share of processor time that other programs may use during a measurement.

If another program computes on one core, all threads of the measurement wait for the thread on this core.
"""
_TIMEOUT_S = 60.0

Round = Mapping[str, tuple[float, float]]
"""Speeds measured in one round: pairs (answers, prompts), each in repetitions of a matrix product per second.

The keys are numbers of threads as text, or "free" and "bound" for threads that are free or bound to cores.
"""


class Kind(Struct, frozen=True):
    """A kind of work with its own setting for the number of threads: answers or prompts.

    `setting`: key of this setting in a layout file.
    `index`: index of the speed in the pair (answers, prompts) of a `Round`.
    """

    setting: str
    index: int


_KINDS = (Kind("threads", 0), Kind("threads_batch", 1))


def thread_counts_to_try(processor: Processor, n_processors: int) -> tuple[int, ...]:
    """Return the numbers of threads to measure, ascending: the default, one for each core, half as many, and one for
    each logical processor.

    With many cores, a quarter of the number of cores is added. All numbers are limited by the CPU quota.

    `n_processors`: number of logical processors that this process may use.
    """
    most = min(MAX_THREADS, processor.quota_cores or MAX_THREADS)
    found = {processor.threads, processor.performance_cores, processor.cores, processor.cores // 2, n_processors}
    if processor.cores >= _MANY_CORES:
        found.add(processor.cores // 4)
    return tuple(sorted({min(each, most) for each in found if each}))


def choose_threads(rounds: Sequence[Round], counts: Sequence[int], base: int, machine: str) -> list[MeasuredChoice]:
    """Return two choices: the fastest number of threads for answers, and that for prompts.

    `rounds`: measured speeds. The keys of each round are the numbers of threads as text.
    `counts`: the measured numbers of threads.
    `base`: the default number of threads, chosen unless another one is faster by `MIN_GAIN` or more.
    `machine`: key of this computer in the speed book.
    """
    found = []
    for kind in _KINDS:
        ratios = {each: _ratio(rounds, kind, str(base), str(each)) for each in counts if each != base}
        faster = {each: ratio for each, ratio in ratios.items() if is_clear_gain(ratio, MIN_GAIN)}
        if faster:
            count = max(faster, key=lambda each: faster[each].value)
            found.append(_choice(kind.setting, count, base, faster[count], machine))
        else:
            found.append(MeasuredChoice(kind.setting, base, base, 1.0, 1.0, 1.0, machine))
    return found


def choose_bound(rounds: Sequence[Round], free: str, bound: str, machine: str) -> MeasuredChoice:
    """Return the measured choice for the setting that binds threads to cores. Its value is 1 (bind) or 0.

    It is 1 if bound threads make answers faster by `MIN_GAIN` or more, and prompts not clearly slower.

    `free`, `bound`: the keys in `rounds` of the speeds with unbound and with bound threads.
    `machine`: key of this computer in the speed book.
    """
    answers, prompts = (_ratio(rounds, kind, free, bound) for kind in _KINDS)
    if is_clear_gain(answers, MIN_GAIN) and not (prompts.differs and prompts.value < 1):
        return _choice(BOUND_THREADS, 1, 0, answers, machine)
    return MeasuredChoice(BOUND_THREADS, 0, 0, 1.0, 1.0, 1.0, machine)


def with_threads(book: SpeedBook, host: Device) -> tuple[SpeedBook, tuple[str, ...]]:
    """Return `book` with the fastest numbers of threads measured on this computer, and sentences for people about the
    result.

    If the measurement fails, the book is unchanged, and one sentence says why. Blocks for some seconds.
    """
    try:
        found = measured_threads(host)
    except EngineError as error:
        return book, (tr("The thread counts were not measured: {problem}", problem=error.summary()),)
    return book.with_choices(found), thread_lines(found)


def thread_lines(found: Sequence[MeasuredChoice]) -> tuple[str, ...]:
    """Return a sentence on the fastest numbers of threads, and one on bound threads if these are faster.

    Empty if no numbers of threads were measured.
    """
    chosen = {each.setting: each for each in found}
    if not {"threads", "threads_batch"} <= chosen.keys():
        return ()
    bound = chosen.get(BOUND_THREADS)
    sentences = [
        tr(
            "CPU threads: {answers} for answers ({gain}), {prompts} for prompts ({prompt_gain}).",
            answers=chosen["threads"].value,
            gain=gain_text(chosen["threads"]),
            prompts=chosen["threads_batch"].value,
            prompt_gain=gain_text(chosen["threads_batch"]),
        )
    ]
    if bound is not None and bound.value:
        sentences.append(
            tr(
                "Threads are bound to physical cores, which was {ratio:.2f} times as fast in the measurement.",
                ratio=bound.ratio,
            )
        )
    return tuple(sentences)


def is_clear_gain(ratio: Ratio | None, least: float) -> bool:
    """Return whether a ratio of speeds is at least `least`, and its whole confidence interval is above 1."""
    return ratio is not None and ratio.low is not None and ratio.low > 1 and ratio.value >= least


def measured_threads(host: Device) -> tuple[MeasuredChoice, ...]:
    """Measure answers and prompts with several numbers of threads, and return the fastest numbers.

    The measurements take some seconds, during which this call blocks. Empty if only one number of threads is possible.

    Raises:
        EngineError: a child failed, or other programs were busy meanwhile.
    """
    processor = own_processor()
    counts, base = thread_counts_to_try(processor, len(usable_processors())), processor.threads
    if len(counts) < 2:
        return ()
    size_bytes = min(_SIZE_BYTES, max(0, host.available_bytes) // _PART)
    machine = machine_key(host)
    rounds: list[Round] = []
    with BlockingChild(timeout_s=_TIMEOUT_S, name=tr("thread test")) as free:
        # A warm-up, whose speed is discarded. Other programs are watched from here on.
        _ask(free, counts[:1], size_bytes)
        quiet = Quiet()
        for number in range(ROUNDS):
            order = [int(each) for each in turn_order(tuple(map(str, counts)), number)]
            rounds.append({str(each): speed for each, speed in _ask(free, order, size_bytes).items()})
        quiet.check()
        chosen = choose_threads(rounds, counts, base, machine)
        count = chosen[0].value
        # OMP_PLACES has one place for each core, so more threads than cores would share places.
        if not 1 < count <= len(core_cpus()):
            return tuple(chosen)
        environment = bound_threads()
        with BlockingChild(timeout_s=_TIMEOUT_S, name=tr("thread test"), environment=environment) as bound:
            children = {"free": free, "bound": bound}
            for child in children.values():
                _ask(child, [count], size_bytes)
            quiet = Quiet()
            rounds = [
                {name: _ask(children[name], [count], size_bytes)[count] for name in turn_order(("free", "bound"), each)}
                for each in range(ROUNDS)
            ]
            quiet.check()
    return (*chosen, choose_bound(rounds, "free", "bound", machine))


class Quiet:
    """Measures the processor time that other programs use between the creation of this object and `check`."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._busy_s, self._own_s = processor_seconds()

    def check(self) -> None:
        """Raise `BusyError` if other programs used more than `BUSY_SHARE` of the processors."""
        busy_s, own_s = processor_seconds()
        others_s = (busy_s - self._busy_s) - (own_s - self._own_s)
        share = load_share(others_s, time.monotonic() - self._begun_s, os.cpu_count() or 1)
        if share is not None and share > BUSY_SHARE:
            raise BusyError(
                tr(
                    "other programs used {share:.0%} of the processors. Measure again when these programs are idle.",
                    share=share,
                )
            )


def _ask(child: BlockingChild, counts: Sequence[int], size_bytes: int) -> dict[int, tuple[float, float]]:
    request = MeasureThreads(counts=tuple(counts), size_bytes=size_bytes, measured_s=_MEASURED_S)
    speeds = child.ask(request, ThreadSpeeds)
    return dict(zip(counts, zip(speeds.answers, speeds.prompts, strict=True), strict=True))


def _ratio(rounds: Sequence[Round], kind: Kind, base: str, other: str) -> Ratio:
    found = ratio_of([(each[base][kind.index], each[other][kind.index]) for each in rounds])
    return found or Ratio(1.0, None, None, 0)


def _choice(setting: str, value: int, base: int, ratio: Ratio, machine: str) -> MeasuredChoice:
    # Only ratios with an interval are clear gains (`is_clear_gain`).
    low, high = ratio.low or ratio.value, ratio.high or ratio.value
    return MeasuredChoice(setting, value, base, ratio.value, low, high, machine)
