"""Rows and reports: what each device would hold (or holds) against what it has, and by how much it is short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import msgspec

from engine.devices.device import Device, Rig
from engine.planning.layout.layout import Violation
from engine.planning.memory.estimate import DeviceMemory, Grade, MemoryEstimate
from engine.planning.plan.advice import Advice
from engine.planning.plan.decisions.decision import Decision
from engine.planning.settings.context_settings import ContextSettings

_PARTS = tuple(field.name for field in fields(DeviceMemory))
_NOTHING = DeviceMemory()


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One device's numbers, to the key of the contract (section Row). `shortfall_bytes` is negative when it fits.

    `pipeline_bytes` is part of `compute_bytes`.
    """

    id: str
    weights_bytes: int
    mapped_bytes: int
    kv_cache_bytes: int
    recurrent_bytes: int
    compute_bytes: int
    pipeline_bytes: int = 0
    output_bytes: int
    overhead_bytes: int
    need_bytes: int
    total_bytes: int
    free_bytes: int | None
    margin_bytes: int
    shortfall_bytes: int
    grade: Grade

    @property
    def is_short(self) -> bool:
        """Whether the device has too little. One with nothing on it is never short."""
        return self.need_bytes > 0 and self.shortfall_bytes > 0

    @property
    def memory(self) -> DeviceMemory:
        """What the device would hold, or holds."""
        return DeviceMemory(**{name: getattr(self, name) for name in _PARTS})

    def without_overhead(self) -> DeviceRow:
        """Return a forecast as far as a load's figures can contain it: the engine tells its buffers and no more."""
        return msgspec.structs.replace(
            self,
            overhead_bytes=0,
            need_bytes=self.need_bytes - self.overhead_bytes,
            shortfall_bytes=self.shortfall_bytes - self.overhead_bytes,
        )


@dataclass(frozen=True, slots=True)
class FitReport:
    """A row per device of the rig (host last), the rules that the layout breaks, what it costs, and what was decided.

    `context`: the settings that the rows are for, with everything decided; None where they were given so.
    """

    rows: tuple[DeviceRow, ...]
    violations: tuple[Violation, ...] = ()
    probe_only: str | None = None
    advice: tuple[Advice, ...] = ()
    decisions: tuple[Decision, ...] = ()
    context: ContextSettings | None = None

    @property
    def fits(self) -> bool:
        """Whether no device is short and no rule is broken."""
        return not self.violations and not any(row.is_short for row in self.rows)


def make_row(device: Device, memory: DeviceMemory, grade: Grade) -> DeviceRow:
    """Return the row of `device` holding `memory`."""
    need_bytes = memory.need_bytes
    return DeviceRow(
        id=device.id,
        weights_bytes=memory.weights_bytes,
        mapped_bytes=memory.mapped_bytes,
        kv_cache_bytes=memory.kv_cache_bytes,
        recurrent_bytes=memory.recurrent_bytes,
        compute_bytes=memory.compute_bytes,
        output_bytes=memory.output_bytes,
        overhead_bytes=memory.overhead_bytes,
        need_bytes=need_bytes,
        total_bytes=device.total_bytes,
        free_bytes=device.free_bytes,
        margin_bytes=device.margin_bytes,
        shortfall_bytes=need_bytes + device.margin_bytes - device.available_bytes,
        grade=grade,
        pipeline_bytes=memory.pipeline_bytes,
    )


def check_fit(estimate: MemoryEstimate, rig: Rig, violations: Sequence[Violation] = ()) -> FitReport:
    """Return a row for every device of `rig`, the host last, with the broken rules beside them."""
    needs = device_needs(estimate, rig)
    rows = tuple(make_row(device, needs[device.id], estimate.grade) for device in rig.all_devices)
    return FitReport(rows=rows, violations=tuple(violations), probe_only=estimate.probe_only)


def device_needs(estimate: MemoryEstimate, rig: Rig) -> dict[str, DeviceMemory]:
    """Return what every device of `rig` would hold, with the overhead that was measured where one was."""
    return {
        device.id: with_measured_overhead(device, estimate.devices.get(device.id, _NOTHING))
        for device in rig.all_devices
    }


def with_measured_overhead(device: Device, memory: DeviceMemory) -> DeviceMemory:
    """Return `memory` with the overhead that was measured on the device, where it holds anything."""
    if device.overhead_bytes is None or not memory.need_bytes:
        return memory
    return replace(memory, overhead_bytes=device.overhead_bytes)


def usable_bytes(rig: Rig) -> dict[str, int]:
    """Return the most bytes that a plan may use of each device: what is available less the margin."""
    return {device.id: max(0, device.available_bytes - device.margin_bytes) for device in rig.all_devices}


def shortfalls(needs: Mapping[str, DeviceMemory], limits: Mapping[str, int]) -> dict[str, int]:
    """Return by how many bytes each device is above its limit; one with nothing on it never is."""
    short = {name: needs[name].need_bytes - limit for name, limit in limits.items() if needs[name].need_bytes}
    return {name: size for name, size in short.items() if size > 0}
