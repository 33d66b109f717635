"""Memory samples of the listed devices, and warnings for devices that hold a loaded model."""

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

# Seconds to wait for the thread at the end.
STOP_S = 0.5


class Sampling(QObject):
    """Reads memory samples of the listed devices in a thread.

    For RPC workers on this computer (the lab rig), a sample has the memory of the worker's process.
    """

    _sampled = Signal(object)

    def __init__(self, live: LiveRig, lab: Lab, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._live = live
        self._lab = lab
        self._readings = DeviceReadings(live.devices.rig.all_devices)
        self._sampler = Sampler(self._readings, self._sampled.emit)
        self._closed = False
        # The sampler calls in its own thread; a queued signal brings the samples into the GUI thread.
        self._sampled.connect(self._on_sampled, Qt.ConnectionType.QueuedConnection)
        live.devices_changed.connect(self._on_devices_changed)

    def start(self) -> None:
        """Start the sampling thread; it reads the first samples at once."""
        self._sampler.start()

    def close(self) -> None:
        """Stop sampling, and wait a short time for the end of the thread, which may hang in a reading."""
        self._closed = True
        self._sampler.stop(STOP_S)

    def _on_devices_changed(self) -> None:
        self._readings.set_devices(self._live.devices.rig.all_devices, self._lab.processes)

    def _on_sampled(self, samples: tuple[Sample, ...]) -> None:
        if not self._closed:
            self._live.take_samples(samples)


WORDS: Mapping[AlertKind, str] = {
    "low": tr("memory is low"),
    "falling": tr("free memory is dropping"),
    "spilled": tr("weights moved to slower memory"),
    "paging": tr("reading weights from disk"),
}


class HeadroomMonitor(QObject):
    """Warns if memory gets low on devices that hold part of a loaded model, and on the host while a model is loaded."""

    alerts_changed = Signal(object)  # dict[str, CardAlert], by device id
    alarmed = Signal(str)
    """Carries the sentence of a new alert."""
    alarm_ended = Signal(str)
    """Carries the sentence of an alert whose cause has ended."""

    def __init__(self, live: LiveRig, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._live = live
        self._watch = HeadroomWatch()
        self._watched: frozenset[str] = frozenset()
        self._alerts: tuple[Alert, ...] = ()
        self._alarms: dict[tuple[str, AlertKind], str] = {}
        """The sentence with which each present alert began, by device id and kind."""
        live.samples_arrived.connect(self._on_samples)

    def watch(self, devices: Collection[str]) -> None:
        """Watch the memory of the devices with these ids, and of the host. If `devices` is empty, watch nothing.

        `devices`: ids of the devices that hold parts of loaded models.
        """
        watched = frozenset((*devices, self._live.rig.host.id)) if devices else frozenset()
        # A new watch begins with new baselines, so the same set must not begin it again.
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
        now = {(each.device, each.kind): each.message for each in alerts}
        for key in self._alarms.keys() - now.keys():
            self.alarm_ended.emit(self._alarms.pop(key))
        for key in now.keys() - self._alarms.keys():
            self._alarms[key] = now[key]
            self.alarmed.emit(now[key])
