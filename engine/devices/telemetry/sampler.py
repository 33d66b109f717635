"""Reads samples of all devices in a thread, each device through its own reader (NVML, sysfs, process memory)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from engine.base.language import tr
from engine.base.pci import parse_pci_id
from engine.devices.device import Device
from engine.devices.telemetry.cards import DRM_ROOT, AmdReader, Nvml, NvmlReader, find_amd_card
from engine.devices.telemetry.processes import HostReader, LocalWorkerReader, WorkerProcess, is_local
from engine.devices.telemetry.sample import NoReader, Reader, Sample

REMOTE_NOTE = tr("remote device: no live readings")


class DeviceReadings:
    """The readers of all devices of a rig.

    `set_devices` may be called from any thread; `read` and `close` from one thread.
    """

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
        """Replace the devices to read. `workers`: processes of the RPC workers that we started, by endpoint."""
        self._readers = tuple(self._reader(device, workers or {}) for device in devices)

    def read(self) -> tuple[Sample, ...]:
        """Return one sample for each device, in the order of the devices."""
        time_s = self._clock()
        return tuple(reader.read(time_s) for reader in self._readers)

    def close(self) -> None:
        """Close NVML."""
        self._nvml.close()

    def _reader(self, device: Device, workers: Mapping[str, WorkerProcess]) -> Reader:
        if device.is_host:
            return HostReader(device.id)
        if device.endpoint is not None:
            process = workers.get(device.endpoint)
            # A paired machine is remote, whatever its address looks like.
            if process is None and (device.fingerprint is not None or not is_local(device.endpoint)):
                return NoReader(device.id, REMOTE_NOTE)
            return LocalWorkerReader(device, process)
        # Only the PCI id is common to ggml, NVML and sysfs; their indices differ.
        pci = parse_pci_id(device.pci_bus_id or "")
        if pci is None:
            return NoReader(
                device.id,
                tr("no live reading: {backend} reports no PCI address for this device", backend=device.backend),
            )
        card = find_amd_card(pci, self._drm_root)
        return NvmlReader(device.id, pci, self._nvml) if card is None else AmdReader(device.id, card)


_log = logging.getLogger(__name__)
DEFAULT_INTERVAL_S = 1.0
STOP_TIMEOUT_S = 2.0


class SampleSource(Protocol):
    """A source of samples for `Sampler`, which calls `read` and `close` in its own thread."""

    def read(self) -> tuple[Sample, ...]:
        """Return one sample for each device."""

    def close(self) -> None:
        """Close the files and libraries opened for reading."""


class Sampler:
    """A thread that reads samples every `interval_s` seconds between `start` and `stop`.

    `on_samples`: called with the samples, in that thread.
    """

    def __init__(
        self,
        source: SampleSource,
        on_samples: Callable[[tuple[Sample, ...]], None],
        interval_s: float = DEFAULT_INTERVAL_S,
    ) -> None:
        self._source = source
        self._on_samples = on_samples
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_failed = False

    def start(self) -> None:
        """Start the thread; the first samples are read at once. A second call has no effect.

        If an earlier thread still hangs in a reading, the new one waits for its end.
        """
        if self._thread is not None and not self._stopping.is_set():
            return
        self._stopping = threading.Event()
        arguments = (self._stopping, self._thread)
        self._thread = threading.Thread(target=self._run, args=arguments, name="telemetry", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Stop the thread. Return False if the thread still runs after `timeout_s` because a reading hangs."""
        self._stopping.set()
        thread = self._thread
        if thread is None:
            return True
        # A driver may hang in a reading; the program must be able to end all the same.
        thread.join(timeout_s)
        if thread.is_alive():
            return False
        self._thread = None
        return True

    def _run(self, stopping: threading.Event, before: threading.Thread | None) -> None:
        # A source is read by one thread.
        if before is not None:
            before.join()
        due_s = time.monotonic()
        while not stopping.is_set():
            self._take(stopping)
            # A late reading shifts the pace rather than being followed by a burst.
            due_s = max(due_s + self._interval_s, time.monotonic())
            stopping.wait(due_s - time.monotonic())
        self._source.close()

    def _take(self, stopping: threading.Event) -> None:
        # The thread's outermost edge: graphs that stop would hide the reason.
        try:
            samples = self._source.read()
            if not stopping.is_set():
                self._on_samples(samples)
        except Exception:
            if not self._has_failed:
                _log.exception("Reading the devices failed; trying on")
            self._has_failed = True
