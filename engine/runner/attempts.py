"""From one layout to the next until one loads: what a load with retries does, step by step, in a thread that may wait.

It asks the engine first (a load that allocates nothing), loads for real what is forecast to fit, and steps back from
what did not. Who gives it probes and real loads decides where these happen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.cancellation import CancelToken
from engine.errors import EngineError
from engine.fit.preview import make_report
from engine.fit.report import DeviceRow, FitReport
from engine.fit.step_back import Refusal, Step, Tried, layout_words, shortage_words, step_back
from engine.layout.layout import Layout
from engine.memory.model_memory import ModelMemory
from engine.runner.events import STAGE_WORDS, Attempt, Cancelled, Loaded, LoadEnding, OutOfMemory
from engine.runner.job import LoadJob
from engine.runner.probe import Probes
from engine.units import format_bytes

FIRST_REASON = "The layout as it was asked for."


@dataclass(frozen=True, slots=True)
class LoadAttempt:
    """One layout that was tried: why this one, and in a sentence what became of it (empty while it is being tried).

    `loaded` False: it was only probed, because what the engine plans for it does not fit.
    """

    number: int
    layout: Layout
    reason: str
    outcome: str = ""
    loaded: bool = False


class Attempts:
    """The attempts of one load. `run` once; `log` and `tried` from any thread."""

    def __init__(
        self,
        job: LoadJob,
        memory: ModelMemory,
        probes: Probes | None,
        load: Callable[[LoadJob], LoadEnding],
        tell: Callable[[Attempt], None],
        cancel: CancelToken,
    ) -> None:
        """`load` loads for real and waits for the ending; `probes` None: the arithmetic has to do."""
        self._job, self._memory, self._probes = job, memory, probes
        self._load, self._tell, self._cancel = load, tell, cancel
        # Replaced whole, so that they may be read anywhere.
        self.log: tuple[LoadAttempt, ...] = ()
        self.tried: tuple[Tried, ...] = ()

    def run(self) -> LoadEnding:
        """Return how it ended: as the last real load did, or `Cancelled`."""
        job, tenths, reason = self._job, 0, FIRST_REASON
        while True:
            self._begin(job.layout, reason)
            rows = self._rows(job)
            if self._cancel.cancelled:
                return self._ended(Cancelled(stage="fit"), "Cancelled.")
            if not FitReport(rows).fits:
                # A forecast refuses nothing: where no other layout is left to try, this one is loaded all the same.
                step = self._next(Tried(job.layout, rows, tenths=tenths))
                if step is not None:
                    outcome = f"Not loaded: the engine's plan is short on {shortage_words(rows)}."
                    self._note(outcome)
                    job, tenths, reason = self._following(job, step, outcome)
                    continue
            ending = self._load(replace(job, forecast=rows))
            refusal = refusal_of(ending) if isinstance(ending, OutOfMemory) else None
            outcome = _outcome_words(ending)
            self._note(outcome, loaded=True)
            tried = Tried(job.layout, rows, refusal, tenths)
            step = self._next(tried) if refusal is not None else None
            if step is None:
                self.tried = (*self.tried, tried)
                return ending
            if self._cancel.cancelled:
                return Cancelled(stage="fit")
            job, tenths, reason = self._following(job, step, outcome)

    def _rows(self, job: LoadJob) -> tuple[DeviceRow, ...]:
        """Return the engine's own forecast, or the arithmetic's where the engine cannot be asked; a load says why."""
        try:
            if self._probes is not None:
                return self._probes.rows(job)
        except EngineError:
            pass
        return make_report(self._memory, job.rig, job.layout, job.context, job.side_files).rows

    def _next(self, tried: Tried) -> Step | None:
        """Return what to try after `tried`, which becomes part of the history if there is something."""
        job = self._job
        if len(self.log) > job.retry.retries:
            return None
        history = (*self.tried, tried)
        step = step_back(self._memory, job.rig, job.context, history, job.retry.constraints, job.side_files)
        if step is not None:
            self.tried = history
        return step

    def _following(self, job: LoadJob, step: Step, outcome: str) -> tuple[LoadJob, int, str]:
        return replace(job, layout=step.layout), step.tenths, f"{outcome} Moved: {step.change}."

    def _begin(self, layout: Layout, reason: str) -> None:
        number = len(self.log) + 1
        self.log = (*self.log, LoadAttempt(number, layout, reason))
        self._tell(Attempt(number=number, layout=layout_words(layout), reason=reason))

    def _note(self, outcome: str, *, loaded: bool = False) -> None:
        self.log = (*self.log[:-1], replace(self.log[-1], outcome=outcome, loaded=loaded))

    def _ended(self, ending: LoadEnding, outcome: str) -> LoadEnding:
        self._note(outcome)
        return ending


def refusal_of(event: OutOfMemory) -> Refusal:
    """Return what the device that refused has shown; what lay there is the sum of what had been placed."""
    placed_bytes = next((row.need_bytes for row in event.allocated if row.id == event.device), 0)
    return Refusal(event.device, event.requested_bytes, event.free_bytes, placed_bytes)


def _outcome_words(ending: LoadEnding) -> str:
    match ending:
        case Loaded():
            return "Loaded."
        case Cancelled():
            return f"Cancelled while {STAGE_WORDS[ending.stage]}."
        case OutOfMemory():
            free = "" if ending.free_bytes is None else f" with {format_bytes(ending.free_bytes)} free"
            asked = format_bytes(ending.requested_bytes)
            return f"{ending.device} refused {asked}{free} while {STAGE_WORDS[ending.stage]}."
        case _:
            return ending.message
