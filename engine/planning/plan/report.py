"""Reports of memory: bytes that each device holds or would hold, compared with its free memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import fields

from engine.base.values import replace
from engine.devices.device import Device, MemoryPool, Rig
from engine.planning.layout.layout import Violation
from engine.planning.memory.estimate import DeviceMemory, Grade, MemoryEstimate
from engine.planning.plan.advice import Advice
from engine.planning.plan.decisions.decision import Decision
from engine.planning.settings.context_settings import ContextSettings

_PARTS = tuple(field.name for field in fields(DeviceMemory))
_NOTHING = DeviceMemory()


class DeviceRow(Struct, frozen=True, kw_only=True):
    """Memory of one device in bytes, with the keys of section Row in docs/contract.md.

    `pipeline_bytes` and `projector_bytes` are parts of `compute_bytes`.
    `answering_bytes`: memory of the CUDA backend besides buffers, during an answer with a full context.
    `late_bytes`: the part of `answering_bytes` that is allocated after the load.
    `draft_bytes`: weights, state and buffers of a draft model, which are in none of the other numbers.
    `free_bytes`: free memory of the device; None if unknown.
    `shortfall_bytes`: missing bytes; negative if the device has memory to spare. For a device that shares the host's
    memory, it is at least the number of bytes that all these devices and the host lack together.
    """

    id: str
    weights_bytes: int
    mapped_bytes: int
    kv_cache_bytes: int
    recurrent_bytes: int
    compute_bytes: int
    pipeline_bytes: int = 0
    projector_bytes: int = 0
    answering_bytes: int = 0
    late_bytes: int = 0
    draft_bytes: int = 0
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
        """Whether the device has too little memory. A device that holds nothing is never short."""
        return self.need_bytes > 0 and self.shortfall_bytes > 0

    @property
    def memory(self) -> DeviceMemory:
        """The row's memory values as `DeviceMemory`: bytes that the device holds, or would hold after a load."""
        return DeviceMemory(**{name: getattr(self, name) for name in _PARTS})

    def without_overhead(self) -> DeviceRow:
        """Return the row without overhead (memory beyond llama.cpp's buffers) and memory allocated during answers.

        This row can be compared with a measured one, because llama.cpp reports its buffers only.
        """
        besides_bytes = self.overhead_bytes + self.answering_bytes
        return replace(
            self,
            overhead_bytes=0,
            answering_bytes=0,
            late_bytes=0,
            need_bytes=self.need_bytes - besides_bytes,
            shortfall_bytes=self.shortfall_bytes - besides_bytes,
        )

    @property
    def buffer_bytes(self) -> int:
        """Bytes of llama.cpp's buffers, including those of a draft model.

        Overhead (memory beyond llama.cpp's buffers) and memory that is allocated during answers are not included.
        """
        return self.need_bytes - self.overhead_bytes - self.answering_bytes


class FitReport(Struct, frozen=True):
    """The memory forecast of a plan, with broken rules, advice and decisions.

    `rows`: one for each device of the rig, the host last.
    `violations`: rules of llama.cpp that the layout breaks.
    `probe_only`: sentence on why the computed numbers are incomplete; None if they are complete.
    `context`: the settings of the forecast, with decided values for "auto"; None if no setting was "auto".
    """

    rows: tuple[DeviceRow, ...]
    violations: tuple[Violation, ...] = ()
    probe_only: str | None = None
    advice: tuple[Advice, ...] = ()
    decisions: tuple[Decision, ...] = ()
    context: ContextSettings | None = None

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory and no rule is broken."""
        return not self.violations and not any(row.is_short for row in self.rows)


def make_row(device: Device, memory: DeviceMemory, grade: Grade) -> DeviceRow:
    """Return the row of a memory report for `device`, which holds or would hold `memory`.

    `grade`: how these numbers are known: estimated, probed or measured.
    """
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
        answering_bytes=memory.answering_bytes,
        late_bytes=memory.late_bytes,
        projector_bytes=memory.projector_bytes,
        draft_bytes=memory.draft_bytes,
    )


def check_fit(estimate: MemoryEstimate, rig: Rig, violations: Sequence[Violation] = ()) -> FitReport:
    """Return the report of `estimate`, compared with the free memory of the rig's devices.

    `violations`: rules that the layout breaks, which become part of the report.
    """
    needs = device_needs(estimate, rig)
    rows = sharing(tuple(make_row(device, needs[device.id], estimate.grade) for device in rig.all_devices), rig)
    return FitReport(rows=rows, violations=tuple(violations), probe_only=estimate.probe_only)


def sharing(rows: tuple[DeviceRow, ...], rig: Rig) -> tuple[DeviceRow, ...]:
    """Correct `rows` for memory that devices share with the host (unified memory), so that it is counted once.

    In the rows of these devices and the host, `free_bytes` excludes the bytes that the others need, and
    `shortfall_bytes` is at least the shortfall of the shared memory as a whole. Rows of other devices are unchanged.
    """
    pool = rig.pool
    if pool is None:
        return rows
    need_bytes = sum(row.need_bytes for row in rows if row.id in pool.ids)

    def share(row: DeviceRow) -> DeviceRow:
        free_bytes = row.total_bytes if row.free_bytes is None else row.free_bytes
        left_bytes = max(0, pool.available_bytes - (need_bytes - row.need_bytes))
        return replace(
            row,
            free_bytes=min(free_bytes, left_bytes),
            shortfall_bytes=max(row.shortfall_bytes, need_bytes - pool.limit_bytes),
        )

    return tuple(share(row) if row.id in pool.ids else row for row in rows)


def missing_bytes(rows: Iterable[DeviceRow], rig: Rig) -> dict[str, int]:
    """Return the missing bytes of each device that has too little memory, by device id.

    Missing bytes are need plus margin less available memory. Devices with enough memory, and rows of devices that `rig`
    lacks, are left out.
    """
    devices, rows = {device.id: device for device in rig.all_devices}, [row for row in rows if row.need_bytes]
    short = {
        row.id: row.need_bytes + devices[row.id].margin_bytes - devices[row.id].available_bytes
        for row in rows
        if row.id in devices
    }
    if rig.pool is not None:
        lacking_bytes = sum(row.need_bytes for row in rows if row.id in rig.pool.ids) - rig.pool.limit_bytes
        short.update({name: max(size, lacking_bytes) for name, size in short.items() if name in rig.pool.ids})
    return {name: size for name, size in short.items() if size > 0}


def device_needs(estimate: MemoryEstimate, rig: Rig) -> dict[str, DeviceMemory]:
    """Return the memory that each device of `rig` would hold, by device id.

    Overhead (memory beyond llama.cpp's buffers) that was measured on a device replaces the estimated one.
    """
    return {
        device.id: with_measured_overhead(device, estimate.devices.get(device.id, _NOTHING))
        for device in rig.all_devices
    }


def with_measured_overhead(device: Device, memory: DeviceMemory) -> DeviceMemory:
    """Return `memory` with the overhead (memory beyond llama.cpp's buffers) that was measured on `device`.

    `memory` is returned unchanged if no overhead was measured, or if the device holds nothing.
    """
    # A device that holds nothing is not opened by the load, so it has no fixed cost.
    if device.overhead_bytes is None or not memory.need_bytes:
        return memory
    return replace(memory, overhead_bytes=device.overhead_bytes)


def usable_bytes(rig: Rig) -> dict[str, int]:
    """Return the bytes that a plan may use on each device: available memory without the margin, at least 0."""
    return {device.id: max(0, device.available_bytes - device.margin_bytes) for device in rig.all_devices}


def shortfalls(
    needs: Mapping[str, DeviceMemory], limits: Mapping[str, int], pool: MemoryPool | None = None
) -> dict[str, int]:
    """Return the missing bytes of each device whose need is above its limit, by device id.

    A device that holds nothing is never included. `pool`: memory that devices share with the host; None if none does.
    """
    # A device may have less than nothing available, because of its margin. It is short only if it is used.
    short = {name: needs[name].need_bytes - limit for name, limit in limits.items() if needs[name].need_bytes}
    if pool is not None:
        lacking_bytes = pooled_bytes(needs, pool) - pool.limit_bytes
        short.update({name: max(size, lacking_bytes) for name, size in short.items() if name in pool.ids})
    return {name: size for name, size in short.items() if size > 0}


def pooled_bytes(needs: Mapping[str, DeviceMemory], pool: MemoryPool) -> int:
    """Return the bytes that the devices of `pool` need together."""
    return sum(needs[name].need_bytes for name in pool.ids if name in needs)
