"""Probing a layout: a no-alloc load in a short-lived child, for the engine's own numbers without the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

from engine.cancellation import CancelToken
from engine.devices.device import Device, Rig
from engine.devices.endpoint import GreetingStatus, greet_all
from engine.errors import BusyError, EngineError, UnreachableError
from engine.fit.advice import advice
from engine.fit.check import check_fit
from engine.fit.report import DeviceRow, FitReport, make_row
from engine.gguf.model_file import ModelFile
from engine.layout.context_settings import ContextSettings
from engine.layout.layout import Layout
from engine.memory.estimate import DeviceMemory, Grade
from engine.memory.side_files import NO_SIDE_FILES, SideFiles
from engine.runner.defect_log import report_defect
from engine.runner.job import LoadJob
from engine.runner.measured import member_estimate, rows_from_parts, with_copies
from engine.runner.one_shot import Questions, raise_if_cancelled
from engine.runner.probe_cache import ProbeCache
from engine.runner.protocol import Probed
from engine.runner.reports import names_of
from engine.runner.spare import SpareChild

DEFAULT_TIMEOUT_S = 60.0


class Probes:
    """Probes one after another, in a child that starts with the first one that is not in `cache` and ends with this.

    Every probe may take `timeout_s`. `spare` gives the child, where there is one; `timeout_s` and `argv` are then its
    own. All calls from one thread; `cancel` from another ends the probe that runs.
    """

    def __init__(
        self,
        *,
        cache: ProbeCache | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        argv: Sequence[str] | None = None,
        cancel: CancelToken | None = None,
        spare: SpareChild | None = None,
    ) -> None:
        self._cache, self._cancel = cache, cancel
        self._spare = spare or SpareChild(timeout_s=timeout_s, argv=argv)
        self._stack = ExitStack()
        self._child: Questions | None = None
        self._environment: Mapping[str, str] = {}
        self._held: set[str] = set()

    def __enter__(self) -> Probes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def rows(self, job: LoadJob) -> tuple[DeviceRow, ...]:
        """Return a row of grade `probed` for every device of the job's rig. Blocks.

        Raises:
            RuleViolationError, LayoutError: for a layout that cannot be loaded.
            UnreachableError: for an endpoint that does not answer; `BusyError` where it serves somebody else.
            EngineError: where the child failed, or after the cancel.
        """
        rows = self._cache.find(job) if self._cache is not None else None
        if rows is None:
            rows = self._ask(job)
            if self._cache is not None:
                self._cache.keep(job, rows)
        return rows

    def _ask(self, job: LoadJob) -> tuple[DeviceRow, ...]:
        request = job.probe_request()
        endpoints = job.used_endpoints()
        # What our child already talks to serves nobody else, and would say that it is busy.
        self._greet({each: devices for each, devices in endpoints.items() if each not in self._held})
        try:
            answer = self._started(job.environment()).ask(request, Probed, cancel=self._cancel)
        except EngineError:
            self._end()
            raise
        self._held |= endpoints.keys()
        members = member_estimate(job, answer.parts)
        rows = rows_from_parts(answer.parts, job.rig, Grade.PROBED, members)
        return _completed(job, with_copies(rows, job.rig, job.resolved().model_estimate.devices))

    def _greet(self, endpoints: Mapping[str, Sequence[Device]]) -> None:
        greetings = greet_all(tuple(endpoints), cancel=self._cancel)
        raise_if_cancelled(self._cancel)
        for endpoint, greeting in greetings.items():
            if not greeting.ok:
                error = BusyError if greeting.status is GreetingStatus.BUSY else UnreachableError
                device = names_of(endpoints[endpoint])
                raise error(f"{device}: {greeting.sentence}", device=device, endpoint=endpoint)

    def _started(self, environment: Mapping[str, str]) -> Questions:
        if self._child is None or environment != self._environment:
            self._end()
            self._environment = environment
            self._child = self._stack.enter_context(self._spare.take(environment))
        return self._child

    def _end(self) -> None:
        self._child = None
        self._held.clear()
        self._stack.close()


def probe(
    job: LoadJob,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    argv: Sequence[str] | None = None,
    cancel: CancelToken | None = None,
) -> tuple[DeviceRow, ...]:
    """Return the rows of one probe; blocks and raises as `Probes.rows` does."""
    with Probes(timeout_s=timeout_s, argv=argv, cancel=cancel) as probes:
        return probes.rows(job)


def _completed(job: LoadJob, rows: tuple[DeviceRow, ...]) -> tuple[DeviceRow, ...]:
    """Return `rows` with what a dry run cannot tell: the overhead of devices and what the host maps.

    A dry run maps nothing and counts all of them as memory; what a load maps follows from the header alone.
    """
    resolved = job.resolved()
    alone = check_fit(resolved.model_estimate, job.rig)
    completed = tuple(map(_completed_row, job.rig.all_devices, alone.rows, rows))
    if alone.probe_only is None:
        report_defect(job, alone.rows, completed)
    if not job.side_files:
        return completed
    # A dry run does not load them; what their weights take follows from their headers.
    whole = check_fit(resolved.estimate, job.rig)
    return tuple(map(_with_side_files, job.rig.all_devices, whole.rows, alone.rows, completed))


def _with_side_files(device: Device, whole: DeviceRow, alone: DeviceRow, row: DeviceRow) -> DeviceRow:
    more = {
        name: getattr(row, name) + getattr(whole, name) - getattr(alone, name)
        for name in ("weights_bytes", "overhead_bytes")
    }
    return make_row(device, replace(row.memory, **more), row.grade)


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
        pipeline_bytes=row.pipeline_bytes,
    )
    return make_row(device, memory, row.grade)


def probe_report(
    model: ModelFile, rig: Rig, layout: Layout, context: ContextSettings, side_files: SideFiles = NO_SIDE_FILES
) -> FitReport:
    """Return the probed rows as a report; blocks and raises as `Probes.rows` does."""
    return _report(LoadJob(model, rig, layout, context, side_files=side_files), None)


def _report(
    job: LoadJob, cancel: CancelToken | None, cache: ProbeCache | None = None, spare: SpareChild | None = None
) -> FitReport:
    with Probes(cache=cache, cancel=cancel, spare=spare) as probes:
        rows = probes.rows(job)
    resolved = job.resolved()
    return FitReport(
        rows,
        advice=advice(job.layout, job.model, job.rig, resolved.context),
        decisions=resolved.decisions,
        context=resolved.context,
    )


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
        side_files: SideFiles = NO_SIDE_FILES,
    ) -> None:
        self._job = LoadJob(model, rig, layout, context, side_files=side_files)
        self._cache = cache
        self._spare = spare
        self._cancel = CancelToken()

    def run(self) -> FitReport:
        """Return the report; blocks and raises as `Probes.rows` does."""
        raise_if_cancelled(self._cancel)
        return _report(self._job, self._cancel, self._cache, self._spare)

    def cancel(self) -> None:
        """End the probe: `run` raises soon. Before `run`, it raises at once."""
        self._cancel.cancel()
