"""The samples of the rig's devices: a thread reads them, and they arrive in the GUI thread."""

from __future__ import annotations

from PySide6.QtCore import QObject, Qt, Signal

from app.rig.lab import Lab
from app.rig.live_rig import LiveRig
from engine.telemetry.sample import Sample
from engine.telemetry.sampler import DeviceReadings, Sampler

STOP_S = 0.5


class Sampling(QObject):
    """Reads the devices that are shown, the lab's workers by their processes."""

    _sampled = Signal(object)

    def __init__(self, live: LiveRig, lab: Lab, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._live = live
        self._lab = lab
        self._readings = DeviceReadings(live.devices.rig.all_devices)
        self._sampler = Sampler(self._readings, self._sampled.emit)
        self._closed = False
        self._sampled.connect(self._on_sampled, Qt.ConnectionType.QueuedConnection)
        live.devices_changed.connect(self._on_devices_changed)

    def start(self) -> None:
        """Begin; the first samples come at once."""
        self._sampler.start()

    def close(self) -> None:
        """Stop. The thread ends by itself; a reading that hangs is not waited for."""
        self._closed = True
        self._sampler.stop(STOP_S)

    def _on_devices_changed(self) -> None:
        self._readings.set_devices(self._live.devices.rig.all_devices, self._lab.processes)

    def _on_sampled(self, samples: tuple[Sample, ...]) -> None:
        if not self._closed:
            self._live.take_samples(samples)
