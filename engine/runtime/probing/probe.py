"""Probes a layout: a load without memory (`no_alloc`) in a short-lived child gives the sizes of llama.cpp's buffers.

Results are cached for the run of the program. If a forecast disagrees with a probe, the log gets everything that is
needed to reproduce the difference.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack

from engine.base.cancellation import CancelToken
from engine.base.engine_build import engine_version
from engine.base.errors import BusyError, EngineError, UnreachableError
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, names_of
from engine.devices.endpoint import GreetingStatus, greet_all
from engine.planning.fit.defects import defect_text, disagreements
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.memory.placement import HostBuffers, place
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow, check_fit, make_row
from engine.runtime.plan_requests import draft_probe_request, environment, probe_request
from engine.runtime.probing.device_rows import member_estimate, rows_from_buffers, with_copies
from engine.runtime.process.blocking_child import BlockingChild, SpareChild, error_with_endpoints, raise_if_cancelled
from engine.runtime.protocol.messages import Probed
from engine.runtime.protocol.requests import DeviceRef, FileAccess, Probe

DEFAULT_TIMEOUT_S = 60.0
ENDPOINTS_TIMEOUT_S = 8.0
"""Time limit of a probe over RPC, in seconds. With the greeting before it (2 s), a probe takes at most 10 s."""


class Probes:
    """Runs probes (loads without memory) one after another in a child process.

    The child starts with the first probe that is not cached, and ends when the `with` block is left. Use this object in
    one thread only.

    `cache`: results of former probes; None for no cache.
    `timeout_s`: time limit of each probe, in seconds.
    `argv`: command that starts the child; None starts the child that runs llama.cpp.
    `cancel`: token that another thread may cancel to end the running probe; None if probes are not cancelled.
    `spare`: source of the child process, whose `timeout_s` and `argv` are used instead. None: a new child is started.
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
        self._child: BlockingChild | None = None
        self._environment: Mapping[str, str] = {}
        self._rights: tuple[FileAccess | None, tuple[DeviceRef, ...], int] = None, (), 0
        self._held: set[str] = set()

    def __enter__(self) -> Probes:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def probed(self, plan: Plan) -> Plan:
        """Return `plan` with the memory of every device as a probe reports it, from the cache or a new probe. Blocks.

        Raises:
            RuleViolationError, LayoutError: the layout cannot be loaded.
            UnreachableError: an endpoint does not answer. BusyError: it serves another client.
            EngineError: the child failed, or the probe was cancelled.
        """
        found = plan if plan.probed is not None or self._cache is None else self._cache.over(plan)
        if found.probed is not None:
            return found
        found = plan.with_probed(self._ask(plan))
        if self._cache is not None:
            self._cache.keep(found)
        return found

    def _ask(self, plan: Plan) -> tuple[DeviceRow, ...]:
        request, of_draft = probe_request(plan), draft_probe_request(plan)
        endpoints = plan.used_endpoints
        # A worker serves one client at a time: one that our child is connected to would answer that it is busy.
        self._greet({each: devices for each, devices in endpoints.items() if each not in self._held}, plan.routes)
        timeout_s = ENDPOINTS_TIMEOUT_S if endpoints else None
        try:
            child = self._started(environment(plan), request)
            answer, drafted = (
                None if each is None else child.ask(each, Probed, cancel=self._cancel, timeout_s=timeout_s, about=mark)
                for each, mark in ((request, plan.mark), (of_draft, f"draft of {plan.mark}"))
            )
        except EngineError as error:
            # The state of the child is unknown after an error; the next probe starts another one.
            self._end()
            raise error_with_endpoints(error, endpoints, plan.routes) from None
        # The child keeps its connections to RPC servers until it ends.
        self._held |= endpoints.keys()
        assert answer is not None  # Only the second request may be missing.
        rows = _rows(plan, answer)
        if drafted is None or plan.draft_plan is None:
            return rows
        return tuple(map(_with_draft, plan.rig.all_devices, rows, _rows(plan.draft_plan, drafted)))

    def _greet(self, endpoints: Mapping[str, Sequence[Device]], routes: Mapping[str, str]) -> None:
        greetings = greet_all(tuple(endpoints), routes=routes, cancel=self._cancel)
        # Greetings that were cut short by the cancel are not "no answer".
        raise_if_cancelled(self._cancel)
        for endpoint, greeting in greetings.items():
            if not greeting.ok:
                error = BusyError if greeting.status is GreetingStatus.BUSY else UnreachableError
                device = names_of(endpoints[endpoint])
                raise error(f"{device}: {greeting.sentence}", device=device, endpoint=endpoint)

    def _started(self, environment: Mapping[str, str], request: Probe) -> BlockingChild:
        """Return the child of the last probe if it can run `request` too, else a new child.

        A new child is needed if the environment, files, devices or memory limit differ from those of the last probe.
        """
        # A child gave up all files, ports of RPC servers and memory but those of its first probe, and ggml reads its
        # variables only once.
        rights = request.access, request.devices, request.memory_bytes
        if self._child is None or (environment, rights) != (self._environment, self._rights):
            self._end()
            self._environment, self._rights = environment, rights
            self._child = self._stack.enter_context(self._spare.take(environment))
        return self._child

    def _end(self) -> None:
        self._child = None
        self._held.clear()
        self._stack.close()


def probe(plan: Plan) -> Plan:
    """Return `plan` with the memory of each device as a probe (load without memory, in a child) reports it. Blocks.

    Raises:
        RuleViolationError, LayoutError: the layout cannot be loaded.
        UnreachableError: an endpoint does not answer. BusyError: it serves another client.
        EngineError: the child failed.
    """
    with Probes() as probes:
        return probes.probed(plan)


def _rows(plan: Plan, answer: Probed) -> tuple[DeviceRow, ...]:
    """Return a row with the memory of each device of `plan`, computed from what a dry load reported."""
    members = member_estimate(plan, answer.parts)
    rows = rows_from_buffers(answer.parts, plan.rig, Grade.PROBED, members)
    return _completed(plan, with_copies(rows, plan.rig, plan.resolved.model_estimate.devices))


def _with_draft(device: Device, row: DeviceRow, of_draft: DeviceRow) -> DeviceRow:
    """Return `row` with `draft_bytes` set to the memory that a dry load of the draft model alone reported."""
    return make_row(device, replace(row.memory, draft_bytes=of_draft.buffer_bytes), row.grade)


def _completed(plan: Plan, rows: tuple[DeviceRow, ...]) -> tuple[DeviceRow, ...]:
    """Return `rows`, the memory of each device in a dry load (`no_alloc`), with its missing and wrong values computed.

    We compute the overhead of devices, the mapped weights and the rounding of pinned host buffers. A dry load maps
    nothing, so it counts all weights as memory. We also compute the sizes of compute buffers if they differ in a real
    load (`_plans_otherwise`). The memory of adapters, projector and draft is added, because a dry load does not load
    them.
    """
    resolved = plan.resolved
    alone = check_fit(resolved.model_estimate, plan.learned_rig)
    host = place(plan.edit.layout, plan.rig, plan.settings).host
    mended = alone.probe_only is None and _plans_otherwise(plan)
    reported = tuple(map(_with_compute, plan.rig.all_devices, alone.rows, rows)) if mended else rows
    completed = tuple(
        _completed_row(device, estimated, row, host if device.is_host else HostBuffers())
        for device, estimated, row in zip(plan.rig.all_devices, alone.rows, reported, strict=True)
    )
    # A model that needs a probe has no forecast to compare with.
    if alone.probe_only is None:
        report_defect(plan, alone.rows, completed)
    if not plan.edit.side_files:
        return completed
    # A dry load has no adapters, projector and draft; the size of their weights follows from their headers.
    whole = check_fit(resolved.estimate, plan.learned_rig)
    return tuple(map(_with_side_files, plan.rig.all_devices, whole.rows, alone.rows, completed))


def _plans_otherwise(plan: Plan) -> bool:
    """Return whether the compute buffers of a dry load of `plan` differ in size from those of a real load.

    That happens on CUDA devices, because a dry load ignores two assignments of a real load: attention that stays on the
    CPU, and norms that are pinned to a device. The sizes that we compute are exact in these cases (`tests/zoo`).
    """
    placement = place(plan.edit.layout, plan.rig, plan.settings)
    entries = [entry for entry in placement.entries if entry != CPU_ID]
    if placement.shares or not all(entry in placement.traits and placement.traits[entry].fuses for entry in entries):
        return False
    return bool(entries) and (not plan.settings.offload_kqv or bool(placement.overrides) or len(placement.entries) > 1)


def _with_compute(device: Device, estimated: DeviceRow, row: DeviceRow) -> DeviceRow:
    """Return the row of a dry load with the size of its compute buffer replaced by the size that we computed.

    The computed size is already rounded for pinned host buffers. The projector's part stays as the dry load reported
    it.

    `estimated`: our computed row.
    `row`: the row of the dry load.
    """
    compute_bytes = estimated.compute_bytes + row.projector_bytes
    memory = replace(row.memory, compute_bytes=compute_bytes, pipeline_bytes=estimated.pipeline_bytes)
    return make_row(device, memory, row.grade)


_BESIDE = (
    "weights_bytes",
    "mapped_bytes",
    "output_bytes",
    "overhead_bytes",
    "answering_bytes",
    "late_bytes",
    "draft_bytes",
)
"""Fields of a `DeviceRow` to which side files (adapters, projector, draft model) add memory."""


def _with_side_files(device: Device, whole: DeviceRow, alone: DeviceRow, row: DeviceRow) -> DeviceRow:
    more = {name: getattr(row, name) + getattr(whole, name) - getattr(alone, name) for name in _BESIDE}
    return make_row(device, replace(row.memory, **more), row.grade)


def _completed_row(device: Device, estimated: DeviceRow, row: DeviceRow, host: HostBuffers) -> DeviceRow:
    maps = device.is_host and estimated.mapped_bytes > 0
    memory = DeviceMemory(
        weights_bytes=estimated.weights_bytes if maps else host.weights.of(row.weights_bytes),
        mapped_bytes=estimated.mapped_bytes if maps else row.mapped_bytes,
        kv_cache_bytes=row.kv_cache_bytes,
        recurrent_bytes=row.recurrent_bytes,
        # The projector's own buffer is not pinned.
        compute_bytes=host.compute.of(row.compute_bytes - row.projector_bytes) + row.projector_bytes,
        output_bytes=row.output_bytes,
        overhead_bytes=estimated.overhead_bytes,
        pipeline_bytes=row.pipeline_bytes,
        answering_bytes=estimated.answering_bytes,
        late_bytes=estimated.late_bytes,
        projector_bytes=row.projector_bytes,
    )
    return make_row(device, memory, row.grade)


class ProbeRun:
    """A single probe (load without memory). One thread calls `run`; any other thread may call `cancel`."""

    def __init__(self, plan: Plan, cache: ProbeCache | None = None, spare: SpareChild | None = None) -> None:
        self._plan = plan
        self._cache = cache
        self._spare = spare
        self._cancel = CancelToken()

    def run(self) -> Plan:
        """Return the plan with the memory of every device as the probe reports it. Blocks.

        Raises:
            RuleViolationError, LayoutError: the layout cannot be loaded.
            UnreachableError: an endpoint does not answer. BusyError: it serves another client.
            EngineError: the child failed, or the probe was cancelled.
        """
        raise_if_cancelled(self._cancel)
        with Probes(cache=self._cache, cancel=self._cancel, spare=self._spare) as probes:
            return probes.probed(self._plan)

    def cancel(self) -> None:
        """Cancel the probe: a running `run` soon raises an error, and a later call raises it immediately."""
        self._cancel.cancel()


CAPACITY = 128


class ProbeCache:
    """Cache of probe results by `Plan.key`. It drops the least recently used result first. Thread-safe.

    It also remembers which plans were loaded and computed a full batch (`note_loaded`).
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._rows: OrderedDict[Hashable, tuple[DeviceRow, ...]] = OrderedDict()
        self._loaded: OrderedDict[Hashable, None] = OrderedDict()

    def note_loaded(self, plan: Plan) -> None:
        """Remember that `plan` was loaded and that its warm-up succeeded, for `is_known_on_host`."""
        key = plan.key
        with self._lock:
            self._loaded.pop(key, None)
            if key is not None:
                self._loaded[key] = None
            while len(self._loaded) > self._capacity:
                self._loaded.popitem(last=False)

    def is_known_on_host(self, plan: Plan) -> bool:
        """Return whether `plan` was loaded before, uses the host alone, and fits into the host's present free memory.

        The warm-up of such a plan needs only one token: on the host a full batch cannot reveal a lack of memory.
        On a card it can, because the card may have lost memory that no driver reports.
        """
        if plan.edit.side_files or plan.parameters.devices or not self._loaded:
            return False
        key = plan.key
        with self._lock:
            known = key is not None and key in self._loaded
        return known and plan.report.fits

    def over(self, plan: Plan) -> Plan:
        """Return `plan` with the cached result of its probe; unchanged if none is cached.

        Results for an earlier version of the model file are not used, because `Plan.key` contains the file's mtime.
        """
        if not self._rows or plan.key is None:
            return plan
        with self._lock:
            rows = self._rows.get(plan.key)
            if rows is None:
                return plan
            self._rows.move_to_end(plan.key)
        return plan.with_probed(rows)

    def keep(self, plan: Plan) -> None:
        """Add the probe result of `plan` to the cache. Does nothing if `plan` was not probed."""
        if plan.key is None or plan.probed is None:
            return
        with self._lock:
            self._rows[plan.key] = plan.probed
            self._rows.move_to_end(plan.key)
            while len(self._rows) > self._capacity:
                self._rows.popitem(last=False)


_log = logging.getLogger("layerdeck.defects")


def report_defect(plan: Plan, estimated: Sequence[DeviceRow], reported: Sequence[DeviceRow]) -> None:
    """Log a warning if forecast and probe of a device differ by more than the tolerance.

    The warning contains the data with which the difference can be reproduced.

    `estimated`: computed rows of the forecast.
    `reported`: rows of the probe.
    """
    if not disagreements(estimated, reported):
        return
    text = defect_text(plan, estimated, reported, engine_version())
    _log.warning("Forecast and engine disagree; to reproduce: %s", text)
