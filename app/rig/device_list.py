"""Which devices are shown: this machine's or a rig file's, with the workers that were added, as a value."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from app.rig.limit_book import LimitBook
from engine.devices.device import Device, Rig
from engine.machines.rigs.check_book import CheckBook

_LocalKey = tuple[str, str | None]
"""Id and PCI id: a card of the same name in another slot is another card."""


@dataclass(frozen=True, slots=True)
class DeviceList:
    """`rig` has the free memory that the devices report; what is loaded beside is not taken off.

    `from_file`: a rig file describes them, and nobody reads their memory. `here`: the local devices of this machine,
    where a search has found some.
    """

    rig: Rig
    from_file: bool = False
    here: frozenset[_LocalKey] = frozenset()

    @property
    def missing(self) -> tuple[str, ...]:
        """Devices of a rig file that this machine does not have; workers elsewhere are asked when they are needed."""
        if not self.from_file:
            return ()
        return tuple(
            device.id for device in self.rig.devices if not device.is_rpc and _local_key(device) not in self.here
        )

    def with_search(self, found: Rig, limits: LimitBook, checks: CheckBook) -> DeviceList:
        """Return the list after a search of this machine: lab and remote workers stay, and so do limits.

        `found` is judged by the engine's checks already, the workers are by `checks`.
        """
        known = {device.id: device for device in self.rig.devices}
        workers = tuple(checks.judged(device) for device in self.rig.devices if device.is_rpc)
        local = tuple(_with_limits(device, known.get(device.id), limits) for device in found.devices)
        rig = Rig((*local, *workers), _with_limits(found.host, self.rig.host, limits))
        return DeviceList(rig, here=_local_keys(found))

    def with_devices(self, devices: Sequence[Device]) -> DeviceList:
        """Return the list with more devices, under other ids where theirs are taken."""
        taken = set(self.rig.ids)
        added = []
        for device in devices:
            device_id = device.id
            number = 0
            while device_id in taken:
                device_id = f"RPC{number}" if device.is_rpc else f"{device.id}-{number}"
                number += 1
            taken.add(device_id)
            added.append(replace(device, id=device_id))
        return self._with((*self.rig.devices, *added))

    def without(self, device_id: str) -> DeviceList:
        """Return the list without a device."""
        return self._with(device for device in self.rig.devices if device.id != device_id)

    def without_endpoints(self, endpoints: Collection[str]) -> DeviceList:
        """Return the list without the workers at these endpoints."""
        return self._with(device for device in self.rig.devices if device.endpoint not in endpoints)

    def with_limits(self, device_id: str, cap_bytes: int | None, margin_bytes: int) -> DeviceList:
        """Return the list with another cap and margin of one device, which may be the host."""

        def limited(device: Device) -> Device:
            return replace(device, cap_bytes=cap_bytes, margin_bytes=margin_bytes) if device.id == device_id else device

        return replace(self, rig=Rig(tuple(map(limited, self.rig.devices)), limited(self.rig.host)))

    def has_other_devices(self, before: DeviceList) -> bool:
        """Whether there are other devices than `before`: not only other limits or other free memory."""
        return _identity(self.rig) != _identity(before.rig)

    def _with(self, devices: Iterable[Device]) -> DeviceList:
        return replace(self, rig=Rig(tuple(devices), self.rig.host))


def list_of_file(rig: Rig, found: Rig) -> DeviceList:
    """Return the devices of a rig file, on a machine on which `found` was found."""
    return DeviceList(rig, from_file=True, here=_local_keys(found))


def _with_limits(device: Device, known: Device | None, limits: LimitBook) -> Device:
    """Return a device that was found, with the limits that people gave it, lately or in an earlier run."""
    kept = limits.apply(device)
    if known is None or kept is not device:
        return kept
    # What is shown of it may have limits that no run keeps: those of a rig file.
    return replace(device, cap_bytes=known.cap_bytes, margin_bytes=known.margin_bytes)


def _local_key(device: Device) -> _LocalKey:
    return device.id, device.pci_bus_id


def _local_keys(rig: Rig) -> frozenset[_LocalKey]:
    return frozenset(_local_key(device) for device in rig.devices if not device.is_rpc)


def _identity(rig: Rig) -> tuple[tuple[str, str | None, str | None], ...]:
    return tuple((device.id, device.endpoint, device.pci_bus_id) for device in rig.all_devices)
