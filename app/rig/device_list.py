"""The window's list of devices as an immutable value: devices of this machine or of a rig file, and added workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec import Struct

from app.rig.limit_store import LimitStore
from engine.base.values import replace
from engine.devices.device import Device, Rig, with_free_ids
from engine.machines.rigs.check_results import CheckResults

_LocalKey = tuple[str, str | None]
"""Id and PCI bus id of a local device: a card with the same id in another slot is another card."""


class DeviceList(Struct, frozen=True):
    """The devices that the window shows.

    `rig`: devices with their reported free memory; the memory of our loaded models is not subtracted.
    `from_file`: whether a rig file describes the devices; then their memory is not sampled.
    `here`: (id, PCI bus id) of each local device that a search of this machine found.
    """

    rig: Rig
    from_file: bool = False
    here: frozenset[_LocalKey] = frozenset()

    @property
    def missing(self) -> tuple[str, ...]:
        """Ids of the local devices that a rig file describes but this computer does not have.

        Workers are never included. Empty if no rig file describes the devices.
        """
        if not self.from_file:
            return ()
        return tuple(
            device.id for device in self.rig.devices if not device.is_rpc and _local_key(device) not in self.here
        )

    def with_search(self, found: Rig, limits: LimitStore, checks: CheckResults) -> DeviceList:
        """Return the list in which the devices in `found` replace the local devices.

        RPC workers stay in the list. The memory limits that the user has set are applied to the found devices.
        `found`: devices that a search of this machine found, with the faults (broken features) from the engine checks.
        `limits`: stored caps and margins. `checks`: results of the checks, for the workers.
        """
        known = {device.id: device for device in self.rig.devices}
        # Workers are not searched for: a busy one would not answer, and would seem to be gone.
        workers = tuple(checks.judged(device) for device in self.rig.devices if device.is_rpc)
        local = tuple(_with_limits(device, known.get(device.id), limits) for device in found.devices)
        rig = Rig((*local, *workers), _with_limits(found.host, self.rig.host, limits))
        return DeviceList(rig, here=_local_keys(found))

    def with_findings(self, found: Rig, limits: LimitStore, checks: CheckResults) -> DeviceList:
        """Return the list with new results of the engine checks, which find features that are broken on a device.

        If a rig file describes the devices, they stay in the list. Otherwise the found devices replace the local ones.

        `found`: devices that a search of this machine found, with the faults from the checks.
        `limits`: stored caps and margins. `checks`: results of the checks, for the workers.
        """
        if not self.from_file:
            return self.with_search(found, limits, checks)
        here = {_local_key(device): device for device in found.devices if not device.is_rpc}

        def judged(device: Device) -> Device:
            if device.is_rpc:
                return checks.judged(device)
            same = found.host if device.is_host else here.get(_local_key(device))
            if same is None:
                return device
            # Faults that the file states hold until a check of the device says otherwise.
            findings = same.findings if same.findings.is_checked else device.findings
            return replace(device, findings=findings, capabilities=same.capabilities)

        rig = Rig(tuple(map(judged, self.rig.devices)), judged(self.rig.host))
        return replace(self, rig=rig, here=_local_keys(found))

    def with_devices(self, devices: Sequence[Device]) -> DeviceList:
        """Return the list with `devices` added; a device whose id is taken gets a free id."""
        return self._with((*self.rig.devices, *with_free_ids(devices, self.rig.ids)))

    def without(self, device_id: str) -> DeviceList:
        """Return the list without the device `device_id`."""
        return self._with(device for device in self.rig.devices if device.id != device_id)

    def with_changed(self, change: Callable[[Device], Device]) -> DeviceList:
        """Return the list with `change` applied to each device except the host; `change` must not change ids."""
        return self._with(map(change, self.rig.devices))

    def without_endpoints(self, endpoints: Collection[str]) -> DeviceList:
        """Return the list without the workers at these endpoints (host:port)."""
        return self._with(device for device in self.rig.devices if device.endpoint not in endpoints)

    def with_limits(self, device_id: str, cap_bytes: int | None, margin_bytes: int) -> DeviceList:
        """Return the list with another memory cap and margin for one device, which may be the host.

        `cap_bytes`: None for no cap.
        """

        def limited(device: Device) -> Device:
            return replace(device, cap_bytes=cap_bytes, margin_bytes=margin_bytes) if device.id == device_id else device

        return replace(self, rig=Rig(tuple(map(limited, self.rig.devices)), limited(self.rig.host)))

    def has_other_devices(self, before: DeviceList) -> bool:
        """Return whether devices were added, removed or replaced since `before`.

        Limits and free memory do not count.
        """
        return _identity(self.rig) != _identity(before.rig)

    def _with(self, devices: Iterable[Device]) -> DeviceList:
        return replace(self, rig=Rig(tuple(devices), self.rig.host))


def list_of_file(rig: Rig, found: Rig) -> DeviceList:
    """Return the device list of an opened rig file.

    `rig`: the devices of the file. `found`: devices that a search of this computer found.
    """
    return DeviceList(rig, from_file=True, here=_local_keys(found))


def _with_limits(device: Device, known: Device | None, limits: LimitStore) -> Device:
    """Return `device`, which a search has found, with the memory cap and margin that the user has set for it.

    These are the stored limits. If none are stored, they are the limits of `known`, which may be from a rig file.
    `known`: the same device in the present list; None if the list lacks it.
    """
    kept = limits.apply(device)
    if known is None or kept is not device:
        return kept
    # Nothing is stored for it, but the listed device may have limits from a rig file.
    return replace(device, cap_bytes=known.cap_bytes, margin_bytes=known.margin_bytes)


def _local_key(device: Device) -> _LocalKey:
    return device.id, device.pci_bus_id


def _local_keys(rig: Rig) -> frozenset[_LocalKey]:
    return frozenset(_local_key(device) for device in rig.devices if not device.is_rpc)


def _identity(rig: Rig) -> tuple[tuple[str, str | None, str | None], ...]:
    return tuple((device.id, device.endpoint, device.pci_bus_id) for device in rig.all_devices)
