"""Comparing an estimate with the devices of a rig."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.devices.device import Device, Rig
from engine.layout.rules import Violation
from engine.memory.estimate import DeviceMemory, MemoryEstimate
from engine.plan.report import FitReport, make_row

_NOTHING = DeviceMemory()


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
