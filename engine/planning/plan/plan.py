"""An edit of a model on a rig as a value: everything that is forecast, decided and told about it hangs here.

Editor, probe, cache, load, report and command line take a `Plan`, so that each of them speaks of the same settings.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from engine.base.errors import EngineError, RuleViolationError
from engine.base.language import tr
from engine.base.texts import show
from engine.devices.device import Device, Rig, names_of, routes_of
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.engine_parameters import EngineParameters, engine_parameters, used_devices
from engine.planning.layout.found_names import found_overrides
from engine.planning.layout.layout import Layout, Violation
from engine.planning.layout.rules import violations
from engine.planning.layout.split_modes import count_unlisted_layers
from engine.planning.memory.model_memory import FEW_TABLES, MOST_TABLES, ModelMemory
from engine.planning.plan.advice import Advice, advice
from engine.planning.plan.decisions.decision import Decision
from engine.planning.plan.decisions.side_files import side_file_violations
from engine.planning.plan.edit import Edit
from engine.planning.plan.report import DeviceRow, FitReport, check_fit, make_row
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings
from engine.planning.settings.table import memory_part

if TYPE_CHECKING:
    from engine.planning.plan.decisions.resolve import Resolved


@dataclass(frozen=True)
class Plan:
    """This edit of this model on this rig. What follows from it is worked out when it is first asked for, and once.

    `memory` has the model and the tables that its plans share: what makes a step of a drag cheap. Its tables are for
    one thread at a time; a thread that plans further takes tables of its own (`with_own_tables`).
    `probed` are rows that the engine told for the same `key`, however much memory was free then.
    """

    memory: ModelMemory
    rig: Rig
    edit: Edit
    probed: tuple[DeviceRow, ...] | None = None

    # ------------------------------------------------------------------ other plans

    def with_edit(self, edit: Edit) -> Plan:
        """Return the plan of another edit; what was probed is not known of it."""
        return Plan(self.memory, self.rig, edit)

    def with_layout(self, layout: Layout) -> Plan:
        """Return the plan of another layout with the same settings and side files."""
        return self.with_edit(replace(self.edit, layout=layout))

    def on(self, rig: Rig) -> Plan:
        """Return the plan of the same edit on another rig, or on the same one with other memory free."""
        return Plan(self.memory, rig, self.edit)

    def with_probed(self, rows: tuple[DeviceRow, ...]) -> Plan:
        """Return the same plan with what the engine told of it."""
        found = replace(self, probed=rows)
        # The settings do not depend on what was probed, and take a whole estimate.
        found.__dict__.update({name: self.__dict__[name] for name in _UNPROBED if name in self.__dict__})
        return found

    def with_own_tables(self) -> Plan:
        """Return the same plan for another thread, with tables for a search: a peak of them is memory for good."""
        most = MOST_TABLES if self.edit.context.n_ctx == AUTO_CONTEXT else FEW_TABLES
        return replace(self, memory=ModelMemory(self.model, most))

    # ------------------------------------------------------------------ what is used

    @property
    def model(self) -> ModelFile:
        return self.memory.model

    @cached_property
    def resolved(self) -> Resolved:
        """The settings that are used, with what was decided and the estimate that the decisions rest on."""
        from engine.planning.plan.decisions.resolve import resolve

        return resolve(self.memory, self.rig, self.edit.layout, self.edit.context, self.edit.side_files)

    @property
    def settings(self) -> ContextSettings:
        """What is used where `edit.context` was asked for: nothing is left open."""
        return self.resolved.context

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return self.resolved.decisions

    # ------------------------------------------------------------------ what is forecast

    @cached_property
    def violations(self) -> tuple[Violation, ...]:
        """The rules that the edit breaks: it cannot be loaded then."""
        edit = self.edit
        return (
            *violations(edit.layout, self.model, self.rig, self.settings),
            *side_file_violations(edit.side_files, edit.layout, self.rig),
        )

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What the edit costs although the engine takes it."""
        return advice(self.edit.layout, self.model, self.rig, self.settings)

    @cached_property
    def report(self) -> FitReport:
        """The forecast against what is free: the engine's rows where they were probed, else the arithmetic's."""
        report = replace(
            check_fit(self.resolved.estimate, self.rig, self.violations),
            advice=self.advice,
            decisions=self.decisions,
            context=self.settings,
        )
        if self.probed is None:
            return report
        told = {row.id: row for row in self.probed}
        rows = tuple(
            make_row(device, told[device.id].memory, told[device.id].grade) if device.id in told else row
            for device, row in zip(self.rig.all_devices, report.rows, strict=True)
        )
        return replace(report, rows=rows, probe_only=None)

    @property
    def forecast(self) -> tuple[DeviceRow, ...]:
        """A row for every device of the rig, the host last."""
        return self.report.rows

    # ------------------------------------------------------------------ what the child is told

    @cached_property
    def parameters(self) -> EngineParameters:
        """What the engine is told of the layout.

        Raises:
            RuleViolationError: with every rule that the edit breaks.
            LayoutError: for what has no translation.
        """
        if self.violations:
            raise RuleViolationError(tuple((each.rule, each.message, each.remedy) for each in self.violations))
        layout = self.edit.layout
        told = engine_parameters(layout, self.model.n_layers, count_unlisted_layers(self.model))
        names = (tensor.name for tensor in self.model.tensors)
        extra_buffers = self.rig.host.fault("extra_buffers") is None
        return msgspec.structs.replace(told, overrides=found_overrides(layout, names), extra_buffers=extra_buffers)

    @cached_property
    def key(self) -> Hashable | None:
        """What the engine's plan depends on: the files as they are now, all that the child is told, and the devices.

        Neither free memory nor threads are part of it. None where there is nothing to ask: for an edit that cannot be
        loaded, and where a file is gone.
        """
        try:
            parameters = self.parameters
            files = tuple((str(path), *_state(path.stat())) for path in self.model.paths)
        except (EngineError, OSError):
            return None
        devices = tuple(map(_identity, self.rig.all_devices))
        return (
            files,
            parameters,
            memory_part(self.settings),
            devices,
            self.edit.side_files,
            self.resolved.projector_device,
        )

    @property
    def mark(self) -> str:
        """What tells this plan from others in a log: the model, and a digest of its key and its runs."""
        layout = self.edit.layout
        runs = ", ".join(f"{run.device} {run.length}" for run in layout.runs)
        digest = hashlib.sha256(repr(self.key).encode("utf-8", "backslashreplace")).hexdigest()[:12]
        name = show(self.model.paths[0].name, 80)
        return f"plan {digest} of {name} ({self.model.architecture}), {layout.split_mode}: {show(runs, 200)}"

    @property
    def routes(self) -> dict[str, str]:
        """Where to dial for endpoints of the rig that are behind a tunnel."""
        return routes_of(self.rig.devices)

    @property
    def used_endpoints(self) -> dict[str, tuple[Device, ...]]:
        """The RPC devices that the edit uses, by endpoint."""
        used = set(used_devices(self.edit.layout))
        projector = self.edit.side_files.projector
        if projector is not None and projector.device is not None:
            used.add(projector.device)
        endpoints: dict[str, tuple[Device, ...]] = {}
        for device in self.rig.devices:
            if device.endpoint is not None and device.id in used:
                endpoints[device.endpoint] = (*endpoints.get(device.endpoint, ()), device)
        return endpoints


_UNPROBED = ("resolved", "violations", "advice", "parameters", "key")
"""What is worked out and does not change when rows are laid over a plan."""


def make_plan(model: ModelFile, rig: Rig, edit: Edit) -> Plan:
    """Return a plan with tables of its own; where more plans of the model follow, keep a `ModelMemory`."""
    return Plan(ModelMemory(model), rig, edit)


def _state(state: os.stat_result) -> tuple[int, int]:
    return state.st_size, state.st_mtime_ns


def _identity(device: Device) -> tuple[object, ...]:
    """Return which device it is; its overhead is part of the rows."""
    return (
        device.id,
        device.backend,
        device.kind,
        device.endpoint,
        device.endpoint_device,
        device.pci_bus_id,
        device.overhead_bytes,
    )


def known_words(plan: Plan) -> str:
    """Return a sentence, for a load or an answer that crashed, on what checks said of the devices that `plan` uses."""
    used = used_devices(plan.edit.layout)
    devices = [device for device in plan.rig.all_devices if device.id in used]
    known = [f"{device.id}: {fault.reason}" for device in devices for fault in device.findings.faults]
    unchecked = [device for device in devices if not device.findings.is_checked]
    if known:
        return tr("Known of it: {names}", names=" ".join(known))
    if unchecked:
        return tr("The engine has not been checked on {names_of} yet.", names_of=names_of(unchecked))
    return tr(
        "An earlier check found nothing wrong with the engine on {names_of}: report this with a new one.",
        names_of=names_of(devices),
    )
