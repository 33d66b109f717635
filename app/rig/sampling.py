"""Samples of the memory of devices: read in a thread, and watched beside what is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from PySide6.QtCore import QObject, Qt, Signal

from app.rig.lab import Lab
from app.rig.live_rig import LiveRig
from engine.base.language import tr
from engine.devices.telemetry.headroom import Alert, AlertKind, HeadroomWatch
from engine.devices.telemetry.sample import Sample
from engine.devices.telemetry.sampler import DeviceReadings, Sampler
from widgets.devices.readings import CardAlert

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


WORDS: Mapping[AlertKind, str] = {
    "low": tr("memory is low"),
    "falling": tr("memory is falling"),
    "spilled": tr("moved to slower memory"),
    "paging": tr("reading weights from disk"),
}


class Watchman(QObject):
    """Follows the samples of devices that hold part of a loaded model, and of the host beside any."""

    alerts_changed = Signal(object)  # dict[str, CardAlert], by device id
    alarmed = Signal(str)
    """The sentence of an alert that was not there before."""

    def __init__(self, live: LiveRig, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._live = live
        self._watch = HeadroomWatch()
        self._watched: frozenset[str] = frozenset()
        self._alerts: tuple[Alert, ...] = ()
        live.samples_arrived.connect(self._on_samples)

    def watch(self, devices: Collection[str]) -> None:
        """Watch the devices with these ids, on which models are loaded now, and the host; none: nothing."""
        watched = frozenset((*devices, self._live.rig.host.id)) if devices else frozenset()
        if watched == self._watched:
            return
        self._watched = watched
        self._watch.begin(device for device in self._live.rig.all_devices if device.id in watched)
        self._show(())

    def _on_samples(self, samples: tuple[Sample, ...]) -> None:
        self._show(self._watch.update(samples))

    def _show(self, alerts: tuple[Alert, ...]) -> None:
        before, self._alerts = self._alerts, alerts
        if alerts == before:
            return
        self.alerts_changed.emit({each.device: CardAlert(WORDS[each.kind], each.message) for each in alerts})
        # By kind, not by sentence: the sentence has numbers, which change with every sample.
        known = {(each.device, each.kind) for each in before}
        for each in alerts:
            if (each.device, each.kind) not in known:
                self.alarmed.emit(each.message)
