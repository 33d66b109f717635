"""Folding the engine's own numbers, given per buffer type, into one row per device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from engine.devices.device import CPU_ID, Rig
from engine.planning.layout.engine_parameters import split_members
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow, make_row
from engine.runtime.protocol.messages import META_PREFIX, Part


def rows_from_parts(
    parts: Iterable[Part], rig: Rig, grade: Grade, estimate: Mapping[str, DeviceMemory] | None = None
) -> tuple[DeviceRow, ...]:
    """Return a row for every device of `rig`, the host last.

    Parts of devices that the rig does not have are left out. Overhead is 0: the engine does not tell it. A tensor split
    that the engine tells as one device gives its members the weights and states of `estimate`, with that grade, and the
    compute buffer that each of them has.
    """
    sums: dict[str, list[int]] = {device_id: [0] * 6 for device_id in rig.ids}
    whole_compute_bytes: int | None = None
    for part in parts:
        row = sums.get(part.device)
        if row is None:
            if part.buffer_type.startswith(META_PREFIX):
                whole_compute_bytes = (whole_compute_bytes or 0) + part.compute_bytes
            continue
        # A file span mapped for the host is page cache and no need; one that a device works on is not reclaimable.
        row[1 if part.mapped and part.device == CPU_ID else 0] += part.weights_bytes
        row[2] += part.kv_cache_bytes
        row[3] += part.recurrent_bytes
        row[4] += part.compute_bytes
        row[5] += part.output_bytes
    rows = tuple(make_row(device, DeviceMemory(*sums[device.id]), grade) for device in rig.all_devices)
    if whole_compute_bytes is None or estimate is None:
        return rows
    return tuple(
        row if (memory := estimate.get(row.id)) is None else _member_row(row, rig, memory, whole_compute_bytes)
        for row in rows
    )


def with_copies(rows: Iterable[DeviceRow], rig: Rig, estimate: Mapping[str, DeviceMemory]) -> tuple[DeviceRow, ...]:
    """Return rows of the engine with what it does not tell: which part of a compute buffer are copies for a pipeline.

    That follows from the arithmetic. A buffer without them is smaller than `estimate` has it by at least as much: the
    engine does without copies where they are refused.
    """
    return tuple(_with_copies(row, rig, estimate.get(row.id, DeviceMemory())) for row in rows)


def _with_copies(row: DeviceRow, rig: Rig, memory: DeviceMemory) -> DeviceRow:
    device = rig.device(row.id)
    if device is None or row.compute_bytes <= memory.compute_bytes - memory.pipeline_bytes:
        return row
    return make_row(device, replace(row.memory, pipeline_bytes=memory.pipeline_bytes), row.grade)


def member_estimate(plan: Plan, parts: Iterable[Part]) -> Mapping[str, DeviceMemory] | None:
    """Return the arithmetic's numbers of the members where the engine told a tensor split as one device."""
    if not any(part.buffer_type.startswith(META_PREFIX) for part in parts):
        return None
    devices = plan.resolved.model_estimate.devices
    return {member: devices.get(member, DeviceMemory()) for member in split_members(plan.edit.layout)}


def _member_row(row: DeviceRow, rig: Rig, memory: DeviceMemory, compute_bytes: int) -> DeviceRow:
    device = rig.device(row.id)
    assert device is not None
    return make_row(device, replace(memory, compute_bytes=compute_bytes, overhead_bytes=0), Grade.ESTIMATED)
