"""Probing a layout: a no-alloc load in a short-lived child, for the engine's own numbers without the memory."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cancellation import CancelToken
from engine.devices.device import CPU_ID, Rig
from engine.devices.endpoint import GreetingStatus, greet_all
from engine.errors import BusyError, UnreachableError
from engine.fit.advice import advice
from engine.fit.report import DeviceRow, FitReport, make_row
from engine.gguf.model_file import ModelFile
from engine.layout.context_settings import ContextSettings
from engine.layout.layout import Layout
from engine.memory.estimate import DeviceMemory, Grade
from engine.memory.model_memory import ModelMemory
from engine.runner.job import LoadJob
from engine.runner.measured import member_estimate, rows_from_parts
from engine.runner.one_shot import ask_child, raise_if_cancelled
from engine.runner.protocol import Probed
from engine.runner.reports import names_of

DEFAULT_TIMEOUT_S = 60.0


def probe(
    job: LoadJob,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    argv: Sequence[str] | None = None,
    cancel: CancelToken | None = None,
) -> tuple[DeviceRow, ...]:
    """Return a row of grade `probed` for every device of the job's rig. Blocks; `cancel` from another thread ends it.

    Raises:
        RuleViolationError, LayoutError: for a layout that cannot be loaded.
        UnreachableError: for an endpoint that does not answer; `BusyError` where it serves somebody else.
        EngineError: where the child failed, or after the cancel.
    """
    request = job.probe_request()
    endpoints = job.used_endpoints()
    greetings = greet_all(endpoints, cancel=cancel)
    raise_if_cancelled(cancel)
    for endpoint, greeting in greetings.items():
        if not greeting.ok:
            error = BusyError if greeting.status is GreetingStatus.BUSY else UnreachableError
            device = names_of(endpoints[endpoint])
            raise error(f"{device}: {greeting.sentence}", device=device, endpoint=endpoint)
    answer = ask_child(request, Probed, timeout_s=timeout_s, argv=argv, cancel=cancel, name="probe")
    estimate = member_estimate(job, answer.parts)
    return _with_mapped_weights(job, rows_from_parts(answer.parts, job.rig, Grade.PROBED, estimate))


def _with_mapped_weights(job: LoadJob, rows: tuple[DeviceRow, ...]) -> tuple[DeviceRow, ...]:
    """Return `rows` with the host's weights as a load would have them.

    A dry run maps nothing and counts all of them as memory; what a load maps follows from the header alone.
    """
    weights = ModelMemory(job.model).estimate(job.layout, job.context, job.rig).devices[CPU_ID]
    if not weights.mapped_bytes:
        return rows
    *others, host = rows
    memory = DeviceMemory(
        weights_bytes=weights.weights_bytes,
        mapped_bytes=weights.mapped_bytes,
        kv_cache_bytes=host.kv_cache_bytes,
        recurrent_bytes=host.recurrent_bytes,
        compute_bytes=host.compute_bytes,
        output_bytes=host.output_bytes,
    )
    return (*others, make_row(job.rig.host, memory, Grade.PROBED))


def probe_report(model: ModelFile, rig: Rig, layout: Layout, context: ContextSettings) -> FitReport:
    """Return the probed rows as a report; blocks and raises as `probe` does."""
    return _report(LoadJob(model, rig, layout, context), None)


def _report(job: LoadJob, cancel: CancelToken | None) -> FitReport:
    return FitReport(probe(job, cancel=cancel), advice=advice(job.layout, job.model, job.rig, job.context))


class ProbeRun:
    """A probe that runs in one thread and is cancelled from another."""

    def __init__(self, model: ModelFile, rig: Rig, layout: Layout, context: ContextSettings) -> None:
        self._job = LoadJob(model, rig, layout, context)
        self._cancel = CancelToken()

    def run(self) -> FitReport:
        """Return the report; blocks and raises as `probe` does."""
        return _report(self._job, self._cancel)

    def cancel(self) -> None:
        """End the probe: `run` raises soon. Before `run`, it raises at once."""
        self._cancel.cancel()
