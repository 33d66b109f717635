"""Probing a layout: a no-alloc load in a short-lived child, for the engine's own numbers without the memory."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cancellation import CancelToken
from engine.devices.device import Device, Rig
from engine.devices.endpoint import GreetingStatus, greet_all
from engine.errors import BusyError, UnreachableError
from engine.fit.advice import advice
from engine.fit.check import check_fit
from engine.fit.report import DeviceRow, FitReport, make_row
from engine.gguf.model_file import ModelFile
from engine.layout.context_settings import ContextSettings
from engine.layout.layout import Layout
from engine.memory.estimate import DeviceMemory, Grade
from engine.memory.model_memory import ModelMemory
from engine.runner.defect_log import report_defect
from engine.runner.job import LoadJob
from engine.runner.measured import member_estimate, rows_from_parts
from engine.runner.one_shot import raise_if_cancelled
from engine.runner.probe_cache import ProbeCache
from engine.runner.protocol import Probed
from engine.runner.reports import names_of
from engine.runner.spare import SpareChild

DEFAULT_TIMEOUT_S = 60.0


def probe(
    job: LoadJob,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    argv: Sequence[str] | None = None,
    cancel: CancelToken | None = None,
    spare: SpareChild | None = None,
) -> tuple[DeviceRow, ...]:
    """Return a row of grade `probed` for every device of the job's rig. Blocks; `cancel` from another thread ends it.

    `spare` gives the child, where there is one; `timeout_s` and `argv` are then its own.

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
    spare = spare or SpareChild(timeout_s=timeout_s, argv=argv)
    with spare.take() as child:
        answer = child.ask(request, Probed, cancel=cancel)
    members = member_estimate(job, answer.parts)
    return _completed(job, rows_from_parts(answer.parts, job.rig, Grade.PROBED, members))


def _completed(job: LoadJob, rows: tuple[DeviceRow, ...]) -> tuple[DeviceRow, ...]:
    """Return `rows` with what a dry run cannot tell: the overhead of devices and what the host maps.

    A dry run maps nothing and counts all of them as memory; what a load maps follows from the header alone.
    """
    estimate = check_fit(ModelMemory(job.model).estimate(job.layout, job.context, job.rig), job.rig)
    completed = tuple(map(_completed_row, job.rig.all_devices, estimate.rows, rows))
    if estimate.probe_only is None:
        report_defect(job, estimate.rows, completed)
    return completed


def _completed_row(device: Device, estimated: DeviceRow, row: DeviceRow) -> DeviceRow:
    maps = device.is_host and estimated.mapped_bytes > 0
    memory = DeviceMemory(
        weights_bytes=estimated.weights_bytes if maps else row.weights_bytes,
        mapped_bytes=estimated.mapped_bytes if maps else row.mapped_bytes,
        kv_cache_bytes=row.kv_cache_bytes,
        recurrent_bytes=row.recurrent_bytes,
        compute_bytes=row.compute_bytes,
        output_bytes=row.output_bytes,
        overhead_bytes=estimated.overhead_bytes,
    )
    return make_row(device, memory, row.grade)


def probe_report(model: ModelFile, rig: Rig, layout: Layout, context: ContextSettings) -> FitReport:
    """Return the probed rows as a report; blocks and raises as `probe` does."""
    return _report(LoadJob(model, rig, layout, context), None)


def _report(
    job: LoadJob, cancel: CancelToken | None, cache: ProbeCache | None = None, spare: SpareChild | None = None
) -> FitReport:
    rows = cache.find(job) if cache is not None else None
    if rows is None:
        rows = probe(job, cancel=cancel, spare=spare)
        if cache is not None:
            cache.keep(job, rows)
    return FitReport(rows, advice=advice(job.layout, job.model, job.rig, job.context))


class ProbeRun:
    """A probe that runs in one thread and is cancelled from another; what is in `cache` costs no child."""

    def __init__(
        self,
        model: ModelFile,
        rig: Rig,
        layout: Layout,
        context: ContextSettings,
        cache: ProbeCache | None = None,
        spare: SpareChild | None = None,
    ) -> None:
        self._job = LoadJob(model, rig, layout, context)
        self._cache = cache
        self._spare = spare
        self._cancel = CancelToken()

    def run(self) -> FitReport:
        """Return the report; blocks and raises as `probe` does."""
        raise_if_cancelled(self._cancel)
        return _report(self._job, self._cancel, self._cache, self._spare)

    def cancel(self) -> None:
        """End the probe: `run` raises soon. Before `run`, it raises at once."""
        self._cancel.cancel()
