"""The lab of the window: capped RPC workers on this machine, from their start to their end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from PySide6.QtCore import QObject, Qt, Signal

from app.background import Background
from app.notices import Notices
from app.rig.live_rig import LiveRig
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.devices.device import Rig
from engine.devices.telemetry.processes import WorkerProcess
from engine.machines.rigs.lab import LabRig

_log = logging.getLogger("layerdeck.rig")


class Lab(QObject):
    """At most one lab at a time; its workers are devices of the rig for as long as it runs."""

    running_changed = Signal(bool)
    worker_lost = Signal(str)
    """A worker ended by itself: the sentence says which, and how."""

    _worker_ended = Signal(str, str)

    def __init__(self, live: LiveRig, background: Background, notices: Notices, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._live = live
        self._background = background
        self._notices = notices
        self._workers: LabRig | None = None
        self._is_starting = False
        self._closed = False
        # From threads of the workers' children.
        self._worker_ended.connect(self._on_worker_ended, Qt.ConnectionType.QueuedConnection)

    @property
    def endpoints(self) -> frozenset[str]:
        """Where the workers listen; empty without a lab."""
        devices = () if self._workers is None else self._workers.rig.devices
        return frozenset(device.endpoint for device in devices if device.endpoint is not None)

    @property
    def processes(self) -> Mapping[str, WorkerProcess]:
        """The workers' processes by endpoint, as their memory is read from the system."""
        lab = self._workers
        if lab is None:
            return {}
        pids = {device.endpoint: (device.id, lab.pid(device.id)) for device in lab.rig.devices}
        return {
            endpoint: WorkerProcess(pid, lab.baseline_bytes(device_id))
            for endpoint, (device_id, pid) in pids.items()
            if endpoint is not None and pid is not None
        }

    def start(self, caps_bytes: Sequence[int], then: Callable[[], None] | None = None) -> None:
        """Start workers with these caps and add them as devices, then call `then`; at once where a lab runs."""
        if self._workers is not None:
            if then is not None:
                then()
            return
        if self._is_starting:
            return
        self._is_starting = True

        def begin() -> LabRig:
            lab = LabRig(caps_bytes, on_worker_ended=self._worker_ended.emit)
            lab.start()
            return lab

        def not_started(error: EngineError) -> None:
            self._is_starting = False
            self._notices.tell(error)

        def show(lab: LabRig) -> None:
            self._is_starting = False
            # Before the devices are shown: who reads their memory asks for the processes then.
            self._workers = lab
            self._live.set_devices(self._live.devices.with_devices(lab.rig.devices))
            self._notices.say(tr("Lab workers started: {count}", count=len(lab.rig.devices)))
            self.running_changed.emit(True)
            if then is not None:
                then()

        self._background.run(tr("Starting lab workers"), begin, show, not_started)

    def stop(self) -> None:
        """End the workers and take them out of the rig."""
        endpoints = self.endpoints
        self._end()
        self._live.set_devices(self._live.devices.without_endpoints(endpoints))

    def leave_unless_in(self, rig: Rig) -> None:
        """End the workers when `rig`, about to be shown, has none of them: nothing would show that they run."""
        if self.endpoints.isdisjoint(device.endpoint for device in rig.devices):
            self._end()

    def close(self) -> None:
        """End the workers, waiting a bounded time."""
        self._closed = True
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _end(self) -> None:
        lab, self._workers = self._workers, None
        if lab is not None:
            self._background.run(tr("Stopping lab workers"), lab.close, _nothing, self._notices.tell)
            self.running_changed.emit(False)

    def _on_worker_ended(self, worker: str, sentence: str) -> None:
        _log.warning("%s: %s", worker, sentence)
        if not self._closed:
            self.worker_lost.emit(sentence)


def _nothing(_result: None) -> None:
    """They are gone; nobody need be told."""
