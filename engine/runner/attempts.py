"""From one layout to the next until one loads: what a load with retries does, step by step, in a thread that may wait.

It asks the engine first (a load that allocates nothing), loads for real what is forecast to fit, and steps back from
what did not. Who gives it probes and real loads decides where these happen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.cancellation import CancelToken
from engine.errors import EngineError
from engine.fit.report import FitReport
from engine.fit.step_back import Refusal, Step, Tried, layout_words, shortage_words, step_back
from engine.layout.layout import Layout
from engine.plan.plan import Plan
from engine.runner.events import STAGE_WORDS, Attempt, Cancelled, Loaded, LoadEnding, OutOfMemory
from engine.runner.load_order import LoadOrder
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
        order: LoadOrder,
        probes: Probes | None,
        load: Callable[[LoadOrder], LoadEnding],
        tell: Callable[[Attempt], None],
        cancel: CancelToken,
    ) -> None:
        """`load` loads for real and waits for the ending; `probes` None: the arithmetic has to do."""
        self._order, self._probes = order, probes
        self._load, self._tell, self._cancel = load, tell, cancel
        # Replaced whole, so that they may be read anywhere.
        self.log: tuple[LoadAttempt, ...] = ()
        self.tried: tuple[Tried, ...] = ()

    def run(self) -> LoadEnding:
        """Return how it ended: as the last real load did, or `Cancelled`."""
        plan, tenths, reason = self._order.plan, 0, FIRST_REASON
        while True:
            self._begin(plan.edit.layout, reason)
            plan = self._probed(plan)
            if self._cancel.cancelled:
                return self._ended(Cancelled(stage="fit"), "Cancelled.")
            layout, rows = plan.edit.layout, plan.forecast
            if not FitReport(rows).fits:
                # A forecast refuses nothing: where no other layout is left to try, this one is loaded all the same.
                step = self._next(Tried(layout, rows, tenths=tenths))
                if step is not None:
                    outcome = f"Not loaded: the engine's plan is short on {shortage_words(rows)}."
                    self._note(outcome)
                    plan, tenths, reason = self._following(step, outcome)
                    continue
            ending = self._load(self._order.with_plan(plan))
            refusal = refusal_of(ending) if isinstance(ending, OutOfMemory) else None
            outcome = _outcome_words(ending)
            self._note(outcome, loaded=True)
            tried = Tried(layout, rows, refusal, tenths)
            step = self._next(tried) if refusal is not None else None
            if step is None:
                self.tried = (*self.tried, tried)
                return ending
            if self._cancel.cancelled:
                return Cancelled(stage="fit")
            plan, tenths, reason = self._following(step, outcome)

    def _probed(self, plan: Plan) -> Plan:
        """Return `plan` with the engine's own forecast; as it is where the engine cannot be asked: a load says why."""
        try:
            return plan if self._probes is None else self._probes.probed(plan)
        except EngineError:
            return plan

    def _next(self, tried: Tried) -> Step | None:
        """Return what to try after `tried`, which becomes part of the history if there is something."""
        retry = self._order.retry
        if len(self.log) > retry.retries:
            return None
        history = (*self.tried, tried)
        step = step_back(self._order.plan, history, retry.constraints)
        if step is not None:
            self.tried = history
        return step

    def _following(self, step: Step, outcome: str) -> tuple[Plan, int, str]:
        return self._order.plan.with_layout(step.layout), step.tenths, f"{outcome} Moved: {step.change}."

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
