"""The work that the machine asks for, which takes its time: each piece in a thread of its own, with one answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.cancellation import CancelToken
from engine.devices.device import Device
from engine.devices.holder import MemoryHolder
from engine.errors import EngineError
from engine.fit.preview import make_report
from engine.fit.report import DeviceRow, FitReport
from engine.fit.step_back import step_back
from engine.memory.model_memory import ModelMemory
from engine.runner.events import Failed
from engine.runner.greeter import greetings_of
from engine.runner.job import LoadJob
from engine.runner.probe import Probes
from engine.runner.probe_cache import ProbeCache
from engine.runner.proposal_checks import LIMIT_S, ProposalCheck, missing_bytes
from engine.session import effects, inputs


def nobody(_device: Device) -> tuple[MemoryHolder, ...]:
    """Tell of no process, where nothing can tell who holds a device's memory."""
    return ()


@dataclass(frozen=True, slots=True)
class Workshop:
    """What work needs. `holders` tells who holds a device's memory; `argv` None: our own worker; time in seconds."""

    cache: ProbeCache
    holders: Callable[[Device], tuple[MemoryHolder, ...]] = nobody
    proposal_limit_s: float = LIMIT_S
    argv: Sequence[str] | None = None

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
                return inputs.Greeted(work.ticket, greetings_of(work.endpoints, cancel))
            case effects.Explain():
                return self._explain(work, cancel)

    def _prepare(self, work: effects.Prepare) -> inputs.Work:
        try:
            return inputs.Prepared(work.ticket, work.job.load_request())
        except EngineError as error:
            return inputs.Refused(work.ticket, Failed(kind=error.kind, message=error.summary()))

    def _forecast(self, work: effects.Forecast, cancel: CancelToken) -> inputs.Work:
        rows = self._probed(work.job, cancel) if work.ask_engine else None
        if rows is None and not cancel.cancelled:
            rows = _estimated(work.job)
        return inputs.Forecasted(work.ticket, rows or (), rows is not None and FitReport(rows).fits)

    def _probed(self, job: LoadJob, cancel: CancelToken) -> tuple[DeviceRow, ...] | None:
        """Return the engine's own forecast; None where it cannot be asked, for a load says why."""
        try:
            with Probes(cache=self.cache, argv=self.argv, cancel=cancel) as probes:
                return probes.rows(job)
        except EngineError:
            return None

    def _choose(self, work: effects.Choose) -> inputs.Work:
        job = work.asked
        memory, constraints = ModelMemory(job.model), job.retry.constraints
        step = step_back(memory, job.rig, job.context, work.tried, constraints, job.side_files)
        return inputs.Chosen(work.ticket, step)

    def _explain(self, work: effects.Explain, cancel: CancelToken) -> inputs.Work:
        job, limit_s = work.asked, self.proposal_limit_s
        tried = tuple(each if each.rows else replace(each, rows=_estimated(job)) for each in work.tried)
        missing = missing_bytes(tried)
        with Probes(cache=self.cache, timeout_s=limit_s, argv=self.argv, cancel=cancel) as probes:
            proposals = ProposalCheck(job, ModelMemory(job.model), missing, probes, cancel, limit_s).run()
        device = job.rig.device(work.ending.device)
        return inputs.Explained(work.ticket, proposals, () if device is None else self.holders(device))


def _estimated(job: LoadJob) -> tuple[DeviceRow, ...]:
    return make_report(ModelMemory(job.model), job.rig, job.layout, job.context, job.side_files).rows
