"""How many threads compute what is on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

from engine.plan.decisions.decision import Decision
from engine.plan.decisions.host_facts import HostFacts
from engine.processor import Processor
from engine.settings.context_settings import ContextSettings


def thread_counts(asked: ContextSettings, host: HostFacts) -> tuple[int, int]:
    """Return the threads for answers and for prompts."""
    threads = asked.threads or host.processor.threads
    return threads, asked.threads_batch or threads


def decide_threads(asked: ContextSettings, host: HostFacts) -> Iterator[Decision]:
    """Yield the threads for answers and for prompts."""
    processor = host.processor
    threads, threads_batch = thread_counts(asked, host)
    if asked.threads is None:
        yield Decision("threads", threads, _reason(processor))
    else:
        yield Decision("threads", threads, _chosen(threads, processor), True)
    if asked.threads_batch is not None:
        yield Decision("threads_batch", threads_batch, _chosen(threads_batch, processor), True)
    elif asked.threads is not None:
        yield Decision("threads_batch", threads_batch, "As many as were chosen for answers.")
    else:
        yield Decision("threads_batch", threads_batch, "As for answers: a second thread on a core adds nothing.")


def _reason(processor: Processor) -> str:
    if processor.quota_cores is not None and processor.quota_cores < processor.performance_cores:
        return f"The control group lets {_cores(processor.quota_cores)} run at once, of {processor.performance_cores}."
    if processor.performance_cores < processor.cores:
        return (
            f"One on each of {_cores(processor.performance_cores)} of full speed: all wait for the slowest, and "
            f"{processor.cores - processor.performance_cores} of {processor.cores} save power."
        )
    return f"One on each of {_cores(processor.cores)} that this program may use."


def _chosen(threads: int, processor: Processor) -> str:
    if threads > processor.cores:
        return f"Chosen, and more than there are cores ({processor.cores}): threads wait for each other then."
    return "Chosen."


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"
