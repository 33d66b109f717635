"""The reader of each device: which source can tell its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine.devices.device import Device
from engine.language import tr
from engine.pci import parse_pci_id
from engine.telemetry.amd import DRM_ROOT, AmdReader, find_amd_card
from engine.telemetry.host import HostReader
from engine.telemetry.nvml import Nvml, NvmlReader
from engine.telemetry.reader import NoReader, Reader
from engine.telemetry.rpc_worker import LocalWorkerReader, WorkerProcess, is_local
from engine.telemetry.sample import Sample

REMOTE_NOTE = tr("remote: no live reading")


class DeviceReadings:
    """Readings of all devices of a rig. `set_devices` may be called from any thread; `read` and `close` from one."""

    def __init__(
        self,
        devices: Sequence[Device] = (),
        workers: Mapping[str, WorkerProcess] | None = None,
        *,
        drm_root: Path = DRM_ROOT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drm_root = drm_root
        self._clock = clock
        self._nvml = Nvml()
        self._readers: tuple[Reader, ...] = ()
        self.set_devices(devices, workers)

    def set_devices(self, devices: Sequence[Device], workers: Mapping[str, WorkerProcess] | None = None) -> None:
        """Read these devices from now on; `workers` tells the processes of endpoints that we started."""
        self._readers = tuple(self._reader(device, workers or {}) for device in devices)

    def read(self) -> tuple[Sample, ...]:
        """Return one sample per device, in their order."""
        time_s = self._clock()
        return tuple(reader.read(time_s) for reader in self._readers)

    def close(self) -> None:
        """Let go of the driver's library."""
        self._nvml.close()

    def _reader(self, device: Device, workers: Mapping[str, WorkerProcess]) -> Reader:
        if device.is_host:
            return HostReader(device.id)
        if device.endpoint is not None:
            process = workers.get(device.endpoint)
            if process is None and (device.fingerprint is not None or not is_local(device.endpoint)):
                return NoReader(device.id, REMOTE_NOTE)
            return LocalWorkerReader(device, process)
        pci = parse_pci_id(device.pci_bus_id or "")
        if pci is None:
            return NoReader(device.id, tr("no live reading for {backend} without a PCI id", backend=device.backend))
        card = find_amd_card(pci, self._drm_root)
        return NvmlReader(device.id, pci, self._nvml) if card is None else AmdReader(device.id, card)
