"""The work that the machine asks for, which takes its time: each piece in a thread of its own, with one answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.cancellation import CancelToken
from engine.devices.device import Device
from engine.devices.endpoint import greet_all
from engine.devices.holder import MemoryHolder
from engine.errors import EngineError
from engine.fit.step_back import step_back
from engine.plan.plan import Plan
from engine.plan.report import FitReport
from engine.plan.requests import load_request
from engine.probing.probe import ProbeCache, Probes
from engine.session import effects, inputs
from engine.session.events import Failed

PROPOSAL_LIMIT_S = 6.0
"""A person waits for the report: what has not been asked by then is shown as estimated."""


def nobody(_device: Device) -> tuple[MemoryHolder, ...]:
    """Tell of no process, where nothing can tell who holds a device's memory."""
    return ()


@dataclass(frozen=True, slots=True)
class Workshop:
    """What work needs. `holders` tells who holds a device's memory; `argv` None: our own worker; time in seconds.

    `sequences`: the folder in which children may save sequences, None for none. It is made before a child starts, which
    may later write to what was there then.
    """

    cache: ProbeCache
    holders: Callable[[Device], tuple[MemoryHolder, ...]] = nobody
    proposal_limit_s: float = PROPOSAL_LIMIT_S
    argv: Sequence[str] | None = None
    sequences: Path | None = None

    def do(self, work: effects.Work, cancel: CancelToken) -> inputs.Work:
        """Return what came of `work`; blocks. `cancel`: nobody waits for all of it any more."""
        match work:
            case effects.Prepare():
                return self._prepare(work)
            case effects.Forecast():
                return self._forecast(work, cancel)
            case effects.Choose():
                return self._choose(work)
            case effects.Greet():
                return inputs.Greeted(work.ticket, greet_all(work.endpoints, routes=work.routes, cancel=cancel))
            case effects.Explain():
                return self._explain(work, cancel)

    def _prepare(self, work: effects.Prepare) -> inputs.Work:
        # Others plan on while this one is loaded: its tables are its own.
        plan = work.plan.with_own_tables()
        if self.sequences is not None:
            with suppress(OSError):  # a child that cannot save says so when it is asked to
                self.sequences.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            request = load_request(plan, sequences=self.sequences)
        except EngineError as error:
            return inputs.Refused(work.ticket, Failed(kind=error.kind, message=error.summary()))
        # Made here, where it may take its time; the machine has none.
        assert plan.forecast
        return inputs.Prepared(work.ticket, plan, request)

    def _forecast(self, work: effects.Forecast, cancel: CancelToken) -> inputs.Work:
        plan = self._probed(work.plan, cancel) if work.ask_engine else work.plan
        return inputs.Forecasted(work.ticket, plan, FitReport(plan.forecast).fits)

    def _probed(self, plan: Plan, cancel: CancelToken) -> Plan:
        """Return `plan` with the engine's own forecast; as it is where the engine cannot be asked: a load says why."""
        try:
            with Probes(cache=self.cache, argv=self.argv, cancel=cancel) as probes:
                return probes.probed(plan)
        except EngineError:
            return plan

    def _choose(self, work: effects.Choose) -> inputs.Work:
        return inputs.Chosen(work.ticket, step_back(work.asked.plan, work.tried, work.asked.retry.constraints))

    def _explain(self, work: effects.Explain, cancel: CancelToken) -> inputs.Work:
        # Only a load that failed has any use for the searches: most children and windows never do.
        from engine.probing.proposal_checks import ProposalCheck, missing_bytes

        plan, limit_s = work.plan, self.proposal_limit_s
        with Probes(cache=self.cache, timeout_s=limit_s, argv=self.argv, cancel=cancel) as probes:
            missing = missing_bytes(work.tried)
            proposals = ProposalCheck(plan, missing, probes, cancel, limit_s, work.constraints).run()
        device = plan.rig.device(work.ending.device)
        return inputs.Explained(work.ticket, proposals, () if device is None else self.holders(device))
