"""Which driver a device is reached through: what was found out about a device holds for its driver."""

from __future__ import annotations

import platform
from collections.abc import Iterable

from engine.devices.device import Device
from engine.pci import parse_pci_id
from engine.telemetry.nvml import Nvml, ask


def read_drivers(devices: Iterable[Device]) -> dict[str, str]:
    """Return the driver of each local card by device id; none for the host and for workers. Takes a moment."""
    cards = {device.id: parse_pci_id(device.pci_bus_id or "") for device in devices if not device.is_rpc}
    nvml = Nvml()
    try:
        kernel = f"{platform.system()} {platform.release()}"
        found = {}
        for device_id, pci in cards.items():
            if pci is None:
                continue
            known = nvml.handle(pci) is not None and nvml.library is not None
            found[device_id] = f"NVIDIA {nvidia_driver(nvml)}" if known else kernel
        return found
    finally:
        nvml.close()


def nvidia_driver(nvml: Nvml) -> str | None:
    """Return the version of NVIDIA's driver, None where it cannot be asked."""
    library = nvml.library
    version = None if library is None else ask(library, library.nvmlSystemGetDriverVersion)
    return None if version is None else str(version)
