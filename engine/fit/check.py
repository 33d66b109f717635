"""Comparing an estimate with the devices of a rig."""

from __future__ import annotations

from collections.abc import Sequence

from engine.devices.device import Rig
from engine.fit.report import FitReport, make_row
from engine.layout.rules import Violation
from engine.memory.estimate import DeviceMemory, MemoryEstimate

_NOTHING = DeviceMemory()


def check_fit(estimate: MemoryEstimate, rig: Rig, violations: Sequence[Violation] = ()) -> FitReport:
    """Return a row for every device of `rig`, the host last, with the broken rules beside them."""
    rows = tuple(
        make_row(device, estimate.devices.get(device.id, _NOTHING), estimate.grade) for device in rig.all_devices
    )
    return FitReport(rows=rows, violations=tuple(violations), probe_only=estimate.probe_only)
