"""`Plan`: one model with layout, settings and side files on a rig, and the values computed from these.

Editor, probe, probe cache, load, report and command line use a `Plan`, so all of them use the same settings.
"""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Hashable
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec import Struct

from engine.base.errors import EngineError, RuleViolationError
from engine.base.language import tr
from engine.base.texts import show
from engine.base.values import replace
from engine.devices.device import ComputingNeed, Device, Rig, device_key, names_of, routes_of
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.engine_parameters import EngineParameters, engine_parameters, used_devices
from engine.planning.layout.found_names import found_overrides
from engine.planning.layout.layout import Layout, Violation
from engine.planning.layout.rules import violations
from engine.planning.layout.split_modes import count_unlisted_layers
from engine.planning.memory.backends import backend_traits
from engine.planning.memory.model_memory import FEW_TABLES, MOST_TABLES, ModelMemory
from engine.planning.plan.advice import Advice, advice, draft_advice, side_file_advice, swap_advice
from engine.planning.plan.decisions.decision import Decision, model_key
from engine.planning.plan.decisions.drafts import draft_violations, reads_slower
from engine.planning.plan.decisions.side_files import side_file_violations
from engine.planning.plan.edit import Edit
from engine.planning.plan.report import DeviceRow, FitReport, check_fit, device_needs, make_row, sharing
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings
from engine.planning.settings.table import memory_key

if TYPE_CHECKING:
    from engine.planning.plan.decisions.resolve import Resolved


class Plan(Struct, frozen=True, dict=True):
    """One model with an edit (layout, settings, side files as the user set them) on a rig (the devices).

    A plan is immutable: each step of a drag makes a new one (`with_edit`, `with_layout`, `on`). Its properties, such as
    memory forecast, decided settings, broken rules and llama.cpp parameters, are computed on first use and cached. A
    plan belongs to one thread, because of `memory`; for another thread, call `with_own_tables`.

    `memory`: the model, and tables for its estimates, which all plans of the model share.
    `rig`: the devices with their free memory.
    `edit`: layout, settings and side files; settings may be on auto.
    `probed`: memory of each device as llama.cpp reported it for a plan with the same `key`; None if there was no probe.
    The free memory in it may be out of date.
    """

    memory: ModelMemory
    rig: Rig
    edit: Edit
    probed: tuple[DeviceRow, ...] | None = None

    # ------------------------------------------------------------------ other plans

    def with_edit(self, edit: Edit) -> Plan:
        """Return a plan for the same model and devices with another layout, settings and side files.

        Its memory forecast is an estimate until `with_probed` adds llama.cpp's numbers.
        """
        return Plan(self.memory, self.rig, edit)

    def with_layout(self, layout: Layout) -> Plan:
        """Return the plan of another layout with the same settings and side files."""
        return self.with_edit(replace(self.edit, layout=layout))

    def on(self, rig: Rig) -> Plan:
        """Return the plan with the same layout and settings for other devices, or after a change of free memory."""
        return Plan(self.memory, rig, self.edit)

    def with_probed(self, rows: tuple[DeviceRow, ...]) -> Plan:
        """Return this plan with `rows`: the memory of each device as llama.cpp reported it for this plan."""
        found = replace(self, probed=rows)
        # Cached values that do not depend on probed rows are taken along: the settings cost a whole estimate.
        found.__dict__.update({name: self.__dict__[name] for name in _UNPROBED if name in self.__dict__})
        return found

    def with_own_tables(self) -> Plan:
        """Return this plan with new, empty tables (`ModelMemory`) for its estimates.

        Tables belong to one thread. With new tables another thread can use the plan.
        """
        # Few tables are kept for a search with one context length: the allocator does not give a peak back.
        most = MOST_TABLES if self.edit.context.n_ctx == AUTO_CONTEXT else FEW_TABLES
        return replace(self, memory=ModelMemory(self.model, most))

    # ------------------------------------------------------------------ what is used

    @property
    def model(self) -> ModelFile:
        return self.memory.model

    @cached_property
    def resolved(self) -> Resolved:
        """The settings that the load uses, the reasons for them, and the memory estimate on which they are based."""
        from engine.planning.plan.decisions.resolve import resolve

        return resolve(self.memory, self.rig, self.edit.layout, self.edit.context, self.edit.side_files)

    @property
    def settings(self) -> ContextSettings:
        """The settings that the load uses. Each has a value; only flash attention may be "auto"."""
        return self.resolved.context

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return self.resolved.decisions

    # ------------------------------------------------------------------ what is forecast

    @cached_property
    def learned_rig(self) -> Rig:
        """The rig, with a larger overhead for devices on which this model ran out of memory in an earlier load.

        The overhead is memory beyond llama.cpp's buffers. Loads with a larger context or micro batch than this plan's
        are ignored. The result is `rig` itself if there was no such load.
        """
        devices = tuple(map(self._learned, self.rig.devices))
        return self.rig if all(map(operator.is_, devices, self.rig.devices)) else Rig(devices, self.rig.host)

    def _learned(self, device: Device) -> Device:
        if not device.computing:
            return device
        asked = self.computing(device)
        least_bytes = max((need.overhead_bytes for need in device.computing if need.covers(asked)), default=0)
        if least_bytes <= (device.overhead_bytes or backend_traits(device).overhead_bytes):
            return device
        return replace(device, overhead_bytes=least_bytes)

    def computing(self, device: Device) -> ComputingNeed:
        """Return the properties of this load that determine its overhead (memory beyond llama.cpp's buffers).

        These are, for instance, device, model, context length and micro batch. Measured overheads of earlier loads are
        looked up by them. The field `overhead_bytes` of the result is 0.
        """
        model, context = self.model, self.settings
        return ComputingNeed(
            device=device_key(device),
            model=model_key(model),
            n_ctx=context.n_ctx or 0,
            n_ubatch=context.n_ubatch,
            flash_attention=context.flash_attn != "off",
            types=(context.type_k, context.type_v),
            overhead_bytes=0,
        )

    @cached_property
    def violations(self) -> tuple[Violation, ...]:
        """Rules of llama.cpp that layout, settings or side files break. If there are any, the plan cannot be loaded."""
        edit = self.edit
        return (
            *violations(edit.layout, self.model, self.rig, self.settings),
            *side_file_violations(edit.side_files, edit.layout, self.rig, self.settings),
            *draft_violations(
                edit.side_files.draft, self.resolved.draft, self.model, self.rig, self.settings, edit.layout
            ),
        )

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """Disadvantages of layout, settings and side files that do not prevent a load."""
        edit = self.edit
        found = (
            *advice(edit.layout, self.model, self.rig, self.settings),
            *side_file_advice(edit.side_files, edit.layout, self.settings),
            *draft_advice(edit.side_files.draft, self.draft_devices, self.model, is_slow=self._drafts_slowly),
        )
        if self._has_room_for_output:
            return found
        return tuple(each for each in found if each.rule != "output_on_cpu")

    @property
    def _has_room_for_output(self) -> bool:
        """Whether the device of the last layers has room for the weights of the output layer too."""
        last = self.rig.device(self.edit.layout.runs[-1].device)
        if last is None or last.is_host:
            return False
        needed_bytes = device_needs(self.resolved.estimate, self.learned_rig)[last.id].need_bytes
        output_bytes = self.memory.weights.output_bytes(backend_traits(last).size_rule)
        return last.available_bytes - last.margin_bytes - needed_bytes >= output_bytes

    @cached_property
    def report(self) -> FitReport:
        """The memory forecast of each device compared with its free memory.

        The numbers are from a probe (a load without allocation) if there was one, else estimated.
        """
        report = replace(
            check_fit(self.resolved.estimate, self.learned_rig, self.violations),
            advice=self.advice,
            decisions=self.decisions,
            context=self.settings,
        )
        if self.probed is None:
            return self._with_swap_advice(report)
        probed = {row.id: row for row in self.probed}
        # Probed rows are made again, because free memory and margins may have changed since the probe.
        rows = tuple(
            make_row(device, probed[device.id].memory, probed[device.id].grade) if device.id in probed else row
            for device, row in zip(self.rig.all_devices, report.rows, strict=True)
        )
        return self._with_swap_advice(replace(report, rows=sharing(rows, self.rig), probe_only=None))

    def _with_swap_advice(self, report: FitReport) -> FitReport:
        """Return `report` with advice if the host's memory is too small, so that swap space would be used."""
        host, row, pool = self.rig.host, report.rows[-1], self.rig.pool
        need_bytes, margin_bytes = row.need_bytes, host.margin_bytes
        if pool is not None:
            need_bytes = sum(each.need_bytes for each in report.rows if each.id in pool.ids)
            margin_bytes = pool.available_bytes - pool.limit_bytes
        found = swap_advice(need_bytes, margin_bytes, host.available_bytes, host.swap_bytes)
        return replace(report, advice=(*report.advice, *found))

    @property
    def forecast(self) -> tuple[DeviceRow, ...]:
        """Memory forecast of every device of the rig, the host last."""
        return self.report.rows

    # ------------------------------------------------------------------ what the child is told

    @cached_property
    def parameters(self) -> EngineParameters:
        """The layout as llama.cpp parameters for the child process that loads the model.

        Raises:
            RuleViolationError: layout, settings or side files break rules of llama.cpp; the error names all of them.
            LayoutError: the layout cannot be translated.
        """
        if self.violations:
            raise RuleViolationError(tuple((each.rule, each.message, each.remedy) for each in self.violations))
        layout = self.edit.layout
        parameters = engine_parameters(layout, self.model.n_layers, count_unlisted_layers(self.model))
        names = (tensor.name for tensor in self.model.tensors)
        # With a fault of the self-test in repacked weights, the CPU uses weights as they are in the file.
        extra_buffers = self.rig.host.fault("extra_buffers") is None
        return replace(parameters, overrides=found_overrides(layout, names), extra_buffers=extra_buffers)

    @property
    def draft_devices(self) -> tuple[str, ...]:
        """Ids of the devices of the draft model; empty if there is none."""
        return () if self.resolved.draft is None else self.resolved.draft.devices

    @property
    def _drafts_slowly(self) -> bool:
        placed, draft = self.resolved.draft, self.edit.side_files.draft
        if placed is None or draft is None or draft.model is None or self.edit.layout.n_layers != self.model.n_layers:
            return False
        return reads_slower(draft.model, placed.layout, self.model, self.edit.layout, self.rig)

    @cached_property
    def draft_plan(self) -> Plan | None:
        """The plan of the draft model alone, with the devices and settings that the load uses; None if there is none.

        It has its own forecast, rules and llama.cpp parameters.
        """
        placed, draft = self.resolved.draft, self.edit.side_files.draft
        if placed is None or draft is None or draft.model is None:
            return None
        return Plan(self.memory.of_draft(draft.model), self.rig, Edit(placed.layout, placed.context))

    @cached_property
    def key(self) -> Hashable | None:
        """Everything that the result of a probe depends on: size and mtime of files, parameters, settings, devices.

        A probe is a load without allocation in a child process, in which llama.cpp reports its memory. Free memory and
        threads are not part of the key. None if nothing can be probed, because the settings or the layout break a rule
        of llama.cpp, or a file is missing.
        """
        try:
            parameters = self.parameters
            # Size and time of change are in the key, so that a replaced file does not get the numbers of the old one.
            files = tuple((str(path), *_state(path.stat())) for path in self.model.paths)
        except (EngineError, OSError):
            return None
        devices = tuple(map(_identity, self.learned_rig.all_devices))
        return (
            files,
            parameters,
            memory_key(self.settings),
            devices,
            self.edit.side_files,
            self.resolved.projector_device,
            self.draft_devices,
        )

    @property
    def mark(self) -> str:
        """Name of this plan in logs: file name of the model, ranges of layers on devices, and a digest of `key`."""
        layout = self.edit.layout
        runs = ", ".join(f"{run.device} {run.length}" for run in layout.runs)
        # Equal plans have equal digests, so log lines can be matched. Paths of the key stay out of the log.
        digest = hashlib.sha256(repr(self.key).encode("utf-8", "backslashreplace")).hexdigest()[:12]
        name = show(self.model.paths[0].name, 80)
        return f"plan {digest} of {name} ({self.model.architecture}), {layout.split_mode}: {show(runs, 200)}"

    @property
    def routes(self) -> dict[str, str]:
        """Local addresses of RPC endpoints that are reached through a tunnel, by endpoint."""
        return routes_of(self.rig.devices)

    @property
    def used_endpoints(self) -> dict[str, tuple[Device, ...]]:
        """The RPC devices that a load of this plan uses, by endpoint ("host:port")."""
        endpoints: dict[str, tuple[Device, ...]] = {}
        for device in self.devices_in_use:
            if device.endpoint is not None:
                endpoints[device.endpoint] = (*endpoints.get(device.endpoint, ()), device)
        return endpoints

    @property
    def devices_in_use(self) -> tuple[Device, ...]:
        """The devices that a load of this plan opens: of the layout, the projector and the draft, without the host."""
        used = {*used_devices(self.edit.layout), *self.draft_devices}
        if self.edit.side_files.projector is not None:
            # The projector may be on a device without layers.
            used.add(self.resolved.projector_device)
        return tuple(device for device in self.rig.devices if device.id in used)


_UNPROBED = ("resolved", "learned_rig", "violations", "advice", "parameters", "draft_plan", "key")
"""Names of cached properties that do not depend on `probed`; `with_probed` copies them."""


def _state(state: os.stat_result) -> tuple[int, int]:
    return state.st_size, state.st_mtime_ns


def _identity(device: Device) -> tuple[object, ...]:
    """Return the fields of a device that are part of `Plan.key`.

    The measured overhead (memory beyond llama.cpp's buffers) is included, because the rows of a probe contain it.
    """
    return (
        device.id,
        device.backend,
        device.kind,
        device.endpoint,
        device.endpoint_device,
        device.pci_bus_id,
        device.overhead_bytes,
    )


def self_test_text(plan: Plan) -> str:
    """Return a sentence for a crash report with the self-test results of the plan's devices."""
    used = used_devices(plan.edit.layout)
    devices = [device for device in plan.rig.all_devices if device.id in used]
    known = [f"{device.id}: {fault.reason}" for device in devices for fault in device.findings.faults]
    unchecked = [device for device in devices if not device.findings.is_checked]
    if known:
        return tr("Known faults: {faults}", faults=" ".join(known))
    if unchecked:
        return tr("The engine has not been checked on {devices} yet.", devices=names_of(unchecked))
    return tr(
        "An earlier engine check on {devices} found no fault. Run the check again and report this crash.",
        devices=names_of(devices),
    )
