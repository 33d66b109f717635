"""What is free for a model beside the others that we have loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from engine.devices.device import Device, Holding, Rig
from engine.fit.loaded_models import HeldModel
from engine.plan.report import DeviceRow

_Others = Sequence[HeldModel]


def rig_beside(
    rig: Rig,
    models: Collection[HeldModel],
    leaving: Collection[HeldModel] = (),
    seen_bytes: Mapping[str, int] | None = None,
) -> Rig:
    """Return `rig` as the next load finds it, with `models` loaded and those of them in `leaving` unloaded.

    `rig` has the free memory that its devices report while all of `models` are loaded. A device has no more free than
    its total (or cap) less what stays there, whatever it reports; what leaves counts as free. A worker that a staying
    model holds has nothing free: it serves one client at a time. `seen_bytes` is what our processes are seen to hold
    of a device, where that is known: no more than this comes back.
    """
    gone = {model.key for model in leaving}
    staying = [model for model in models if model.key not in gone]
    seen = seen_bytes or {}

    def beside(device: Device) -> Device:
        returned_bytes = sum(model.held_bytes.get(device.id, 0) for model in leaving)
        return _device_beside(device, staying, min(returned_bytes, seen.get(device.id, returned_bytes)))

    return Rig(tuple(map(beside, rig.devices)), beside(rig.host))


def _device_beside(device: Device, staying: _Others, returned_bytes: int) -> Device:
    holdings = tuple(
        Holding(model.name, model.held_bytes.get(device.id, 0), model.key)
        for model in staying
        if model.held_bytes.get(device.id, 0) or device.endpoint in model.endpoints
    )
    staying_bytes = sum(holding.size_bytes for holding in holdings)
    limit_bytes = device.total_bytes if device.cap_bytes is None else min(device.total_bytes, device.cap_bytes)
    free_bytes = device.free_bytes
    if free_bytes is not None:
        free_bytes = max(0, min(free_bytes + returned_bytes, device.total_bytes))
    if any(device.endpoint in model.endpoints for model in staying):
        free_bytes = 0
    elif staying_bytes:
        room_bytes = max(0, limit_bytes - staying_bytes)
        free_bytes = room_bytes if free_bytes is None else min(free_bytes, room_bytes)
    return replace(device, free_bytes=free_bytes, holdings=holdings)


def rows_fit(rows: Iterable[DeviceRow], rig: Rig) -> bool:
    """Return whether the needs of `rows`, with the devices' margins, are free in `rig`. Where nothing goes all is."""
    devices = {device.id: device for device in rig.all_devices}
    return all(
        row.need_bytes + devices[row.id].margin_bytes <= devices[row.id].available_bytes
        for row in rows
        if row.need_bytes and row.id in devices
    )
