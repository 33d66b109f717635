"""Decisions on the number of CPU threads, and `HostFacts`, the properties of the computer that decisions use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache

from msgspec import Struct

from engine.base.language import tr, tr_count
from engine.base.processor import Processor, own_processor
from engine.base.values import replace
from engine.devices.device import MeasuredChoice, Rig
from engine.planning.plan.decisions.decision import BOUND_THREADS, Decision, gain_text, measured_choice
from engine.planning.settings.context_settings import ContextSettings


class HostFacts(Struct, frozen=True):
    """Properties of the computer on which the model is loaded.

    `platform`: value of `sys.platform`.
    `answers`, `prompts`: measured numbers of threads for answers and for prompts; None: not measured.
    """

    platform: str
    processor: Processor
    answers: MeasuredChoice | None = None
    prompts: MeasuredChoice | None = None

    def measured_on(self, rig: Rig) -> HostFacts:
        """Return a copy with the numbers of threads that were measured on the host of `rig`, if any were measured."""
        found = measured_choice(rig, "threads"), measured_choice(rig, "threads_batch")
        return self if found == (None, None) else replace(self, answers=found[0], prompts=found[1])


@cache
def own_host() -> HostFacts:
    """Return the properties of this computer; they are read once and cached."""
    return HostFacts(sys.platform, own_processor())


def thread_counts(asked: ContextSettings, host: HostFacts) -> tuple[int, int]:
    """Return (threads for answers, threads for prompts), as in llama.cpp's `n_threads` and `n_threads_batch`.

    `asked`: the user's settings; a number of threads is None for "auto".
    """
    # Unless it was measured: one for each physical performance core that this program may use, at most the quota of its
    # control group.
    threads = asked.threads or (host.answers.value if host.answers else host.processor.threads)
    measured = host.prompts if asked.threads is None else None
    return threads, asked.threads_batch or (measured.value if measured else threads)


def binds_threads(rig: Rig, asked: ContextSettings) -> bool:
    """Return whether the threads of a load are bound to physical cores.

    They are bound if bound threads were faster in a measurement on this computer, and the user has not chosen a number
    of threads in the settings `asked`.
    """
    choice = measured_choice(rig, BOUND_THREADS)
    return choice is not None and choice.value == 1 and asked.threads is None and asked.threads_batch is None


def decide_threads(asked: ContextSettings, host: HostFacts) -> Iterator[Decision]:
    """Yield the decisions on threads for answers (`threads`) and for prompts (`threads_batch`).

    `asked`: the user's settings; a number of threads is None for "auto".
    """
    processor = host.processor
    threads, threads_batch = thread_counts(asked, host)
    if asked.threads is None:
        measured = host.answers
        yield Decision("threads", threads, _measured(measured, processor) if measured else _reason(processor))
    else:
        yield Decision("threads", threads, _chosen(threads, processor), True)
    if asked.threads_batch is not None:
        yield Decision("threads_batch", threads_batch, _chosen(threads_batch, processor), True)
    elif asked.threads is not None:
        yield Decision("threads_batch", threads_batch, tr("Same as the chosen number of threads for answers."))
    elif host.prompts is not None:
        yield Decision("threads_batch", threads_batch, _measured(host.prompts, processor))
    else:
        yield Decision(
            "threads_batch",
            threads_batch,
            tr("The same as for answers: a second thread on a core makes prompts no faster."),
        )


def _reason(processor: Processor) -> str:
    if processor.quota_cores is not None and processor.quota_cores < processor.performance_cores:
        return tr(
            "This program may use only {cores} (CPU quota of its cgroup), although the CPU has {performance_cores} "
            "performance cores.",
            cores=_cores(processor.quota_cores),
            performance_cores=processor.performance_cores,
        )
    if processor.performance_cores < processor.cores:
        return tr(
            "One thread per performance core ({cores}). {efficiency_cores} of {all_cores} cores are slower, and "
            "all threads would have to wait for the slower cores.",
            cores=_cores(processor.performance_cores),
            efficiency_cores=processor.cores - processor.performance_cores,
            all_cores=processor.cores,
        )
    return tr("One thread on each of {cores} that this program may use.", cores=_cores(processor.cores))


def _measured(choice: MeasuredChoice, processor: Processor) -> str:
    return tr(
        "{threads} on {cores}, as measured: {gain}.",
        threads=tr_count("{count} thread", "{count} threads", choice.value),
        cores=_cores(processor.cores),
        gain=gain_text(choice),
    )


def _chosen(threads: int, processor: Processor) -> str:
    if threads > processor.cores:
        return tr(
            "Set explicitly. There are more threads than cores ({cores}), so threads wait for each other.",
            cores=processor.cores,
        )
    return tr("Set explicitly.")


def _cores(count: int) -> str:
    return tr_count("{count} core", "{count} cores", count)
