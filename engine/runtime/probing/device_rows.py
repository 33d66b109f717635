"""Adds up llama.cpp's bytes in each buffer type to one row for each device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig
from engine.planning.layout.engine_parameters import split_members
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow, make_row
from engine.runtime.protocol.messages import META_PREFIX, PROJECTOR, BufferMemory

_SUMS = (
    "weights_bytes",
    "mapped_bytes",
    "kv_cache_bytes",
    "recurrent_bytes",
    "compute_bytes",
    "output_bytes",
    "projector_bytes",
    "draft_bytes",
)


_DRAFT = _SUMS.index("draft_bytes")


def rows_from_buffers(
    parts: Iterable[BufferMemory], rig: Rig, grade: Grade, estimate: Mapping[str, DeviceMemory] | None = None
) -> tuple[DeviceRow, ...]:
    """Add up `parts`, the bytes in each buffer type, and return a row for every device of `rig`, the host last.

    Parts of devices that are not in the rig are left out. The overhead of a device is 0, because llama.cpp does not
    report it. For a tensor split llama.cpp reports a single Meta device. Then the row of each device of the split has
    weights and state from `estimate`, the whole compute buffer of the Meta device, and the grade `estimated`.
    `grade`: grade of all rows except those of devices of a tensor split.
    `estimate`: estimated memory of the devices of a tensor split; None if llama.cpp reported each of them.
    """
    sums: dict[str, list[int]] = {device_id: [0] * len(_SUMS) for device_id in rig.ids}
    whole_compute_bytes: int | None = None
    for part in parts:
        row = sums.get(part.device)
        if row is None:
            if part.buffer_type.startswith(META_PREFIX):
                whole_compute_bytes = (whole_compute_bytes or 0) + part.compute_bytes
            continue
        # Mapped weights of the CPU are page cache, which the system can drop. A mapping that a GPU reads (Metal) stays.
        is_mapped = part.mapped and part.device == CPU_ID
        row[1 if is_mapped else _DRAFT if part.draft else 0] += part.weights_bytes
        if part.draft:
            row[_DRAFT] += part.kv_cache_bytes + part.recurrent_bytes + part.compute_bytes + part.output_bytes
            continue
        row[2] += part.kv_cache_bytes
        row[3] += part.recurrent_bytes
        row[4] += part.compute_bytes
        row[5] += part.output_bytes
        row[6] += part.compute_bytes if part.buffer_type == PROJECTOR else 0
    rows = tuple(
        make_row(device, DeviceMemory(**dict(zip(_SUMS, sums[device.id], strict=True))), grade)
        for device in rig.all_devices
    )
    if whole_compute_bytes is None or estimate is None:
        return rows
    return tuple(
        row if (memory := estimate.get(row.id)) is None else _member_row(row, rig, memory, whole_compute_bytes)
        for row in rows
    )


def with_copies(rows: Iterable[DeviceRow], rig: Rig, estimate: Mapping[str, DeviceMemory]) -> tuple[DeviceRow, ...]:
    """Return `rows` with `pipeline_bytes`, the part of each compute buffer that holds copies for pipeline parallelism.

    llama.cpp does not report that part; it is taken from `estimate`. If the copies did not fit, llama.cpp allocated
    the buffer without them. Then it is smaller than in `estimate` by at least their size, and the part is 0.
    """
    return tuple(_with_copies(row, rig, estimate.get(row.id, DeviceMemory())) for row in rows)


def _with_copies(row: DeviceRow, rig: Rig, memory: DeviceMemory) -> DeviceRow:
    device = rig.device(row.id)
    of_model_bytes = row.compute_bytes - row.projector_bytes
    if device is None or of_model_bytes <= memory.compute_bytes - memory.pipeline_bytes:
        return row
    return make_row(device, replace(row.memory, pipeline_bytes=memory.pipeline_bytes), row.grade)


def member_estimate(plan: Plan, parts: Iterable[BufferMemory]) -> Mapping[str, DeviceMemory] | None:
    """Return the estimated memory of the devices of a tensor split, by device id.

    Return None if llama.cpp reported the memory of each device. For a tensor split it reports a single Meta device,
    which stands for all devices of the split.
    """
    if not any(part.buffer_type.startswith(META_PREFIX) for part in parts):
        return None
    devices = plan.resolved.model_estimate.devices
    return {member: devices.get(member, DeviceMemory()) for member in split_members(plan.edit.layout)}


def _member_row(row: DeviceRow, rig: Rig, memory: DeviceMemory, compute_bytes: int) -> DeviceRow:
    device = rig.device(row.id)
    assert device is not None
    return make_row(
        device,
        replace(
            memory,
            compute_bytes=compute_bytes + row.projector_bytes,
            projector_bytes=row.projector_bytes,
            overhead_bytes=0,
            answering_bytes=0,
            late_bytes=0,
            draft_bytes=row.draft_bytes,
        ),
        Grade.ESTIMATED,
    )
