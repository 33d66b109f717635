"""Starts and stops the window's lab rig: RPC workers on this machine.

Either their memory is capped, to try layouts for cards that this machine lacks, or each is bound to a NUMA node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from PySide6.QtCore import QObject, Qt, Signal

from app.background import Background
from app.notices import Notices
from app.rig.live_rig import LiveRig
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.base.numa import NumaNode
from engine.devices.device import Rig, names_of
from engine.devices.telemetry.processes import WorkerProcess
from engine.machines.rigs.lab import LabRig, memory_not_bound, numa_rig

_log = logging.getLogger("layerdeck.rig")


class Lab(QObject):
    """Starts, restarts and stops at most one lab rig (RPC workers on this computer).

    While it runs, its workers are in the device list.
    """

    running_changed = Signal(bool)
    worker_lost = Signal(str)
    """Emitted when a worker ended by itself. The text is a sentence with its name and the reason."""
    stopped_changed = Signal(tuple)
    """Carries the device ids of workers that ended by themselves, in the order of the rig; empty when all run again."""

    _worker_ended = Signal(str, str)

    def __init__(self, live: LiveRig, background: Background, notices: Notices, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._live = live
        self._background = background
        self._notices = notices
        self._workers: LabRig | None = None
        self._ending: list[LabRig] = []
        """Labs whose workers are being stopped in the background."""
        self._stopped: set[str] = set()
        """Ids of workers that ended by themselves, in the lab's own numbering (the device list may use other ids)."""
        self._is_starting = False
        self._then: list[Callable[[], None]] = []
        """Callbacks that wait for workers that are being started or restarted."""
        self._closed = False
        # From threads of the workers' children.
        self._worker_ended.connect(self._on_worker_ended, Qt.ConnectionType.QueuedConnection)

    @property
    def endpoints(self) -> frozenset[str]:
        """Endpoints (host:port) of the workers; empty if there is no lab rig."""
        devices = () if self._workers is None else self._workers.rig.devices
        return frozenset(device.endpoint for device in devices if device.endpoint is not None)

    @property
    def has_nodes(self) -> bool:
        """Whether the workers are bound to NUMA nodes. If not, caps on their memory simulate other devices."""
        return self._workers is not None and self._workers.has_nodes

    @property
    def processes(self) -> Mapping[str, WorkerProcess]:
        """The process of each running worker, by the worker's endpoint.

        A value has the process id, and the bytes that the process uses before a client allocates memory.
        """
        lab = self._workers
        if lab is None:
            return {}
        # The process id of a worker that ended may be another program's by now.
        running = (device for device in lab.rig.devices if device.id not in self._stopped)
        pids = {device.endpoint: (device.id, lab.pid(device.id)) for device in running}
        return {
            endpoint: WorkerProcess(pid, lab.baseline_bytes(device_id))
            for endpoint, (device_id, pid) in pids.items()
            if endpoint is not None and pid is not None
        }

    def start(self, caps_bytes: Sequence[int], then: Callable[[], None] | None = None) -> None:
        """Start a worker for each of these memory caps in bytes, add the workers as devices, then call `then`.

        If a lab rig runs already, only `then` is called, at once.
        """
        self._start(lambda: LabRig(caps_bytes, on_worker_ended=self._worker_ended.emit), then)

    def start_nodes(self, nodes: Sequence[NumaNode]) -> None:
        """Start a worker for each of these NUMA nodes, bound to the node, and add the workers as devices.

        If a lab rig runs, it must be stopped first; a notice says so.
        """
        if self._workers is not None or self._is_starting:
            self._notices.show(tr("First stop the lab rig (Devices > Stop Lab Rig)"))
            return
        self._start(lambda: numa_rig(nodes, on_worker_ended=self._worker_ended.emit), None)

    def _start(self, make: Callable[[], LabRig], then: Callable[[], None] | None) -> None:
        if self._workers is not None:
            if then is not None:
                then()
            return
        if then is not None:
            self._then.append(then)
        if self._is_starting:
            return
        # Set in the GUI thread, so that a second request in the same moment starts no second lab.
        self._is_starting = True

        def begin() -> LabRig:
            lab = make()
            lab.start()
            return lab

        def show(lab: LabRig) -> None:
            self._is_starting = False
            # Before the devices are shown: who reads their memory asks for the processes then.
            self._workers = lab
            self._live.set_devices(self._live.devices.with_devices(lab.rig.devices))
            self._notices.show(self._description)
            if warning := memory_not_bound(lab.unbound_nodes):
                self._notices.show(warning)
            self.running_changed.emit(True)
            self._go_on()

        self._background.run(tr("Starting lab workers (RPC workers on this computer)"), begin, show, self._not_started)

    def _not_started(self, error: EngineError) -> None:
        self._is_starting = False
        self._then.clear()
        self._notices.show_error(error)

    def _go_on(self) -> None:
        """Call the callbacks that were passed to `when_running`; first restart workers that have ended meanwhile."""
        waiting, self._then = self._then, []
        for do in waiting:
            self.when_running(do)

    @property
    def _description(self) -> str:
        """A sentence for users that explains the devices of the lab rig, whose ids (such as RPC0) say little."""
        endpoints = self.endpoints
        devices = [device for device in self._live.devices.rig.devices if device.endpoint in endpoints]
        names = [device.id for device in devices]
        if self.has_nodes:
            return tr("{names} are the NUMA nodes of this computer's processor", names=names_of(devices))
        if len(names) == 1:
            return tr("{name} is a simulated device on this computer", name=names[0])
        if len(names) == 2:
            return tr("{first} and {last} are two simulated devices on this computer", first=names[0], last=names[1])
        return tr(
            "{first} to {last} are {count} simulated devices on this computer",
            first=names[0],
            last=names[-1],
            count=len(names),
        )

    @property
    def stopped(self) -> tuple[str, ...]:
        """Device ids (as in the device list) of the workers that ended by themselves."""
        return self._live.stopped_devices

    def restart(self) -> None:
        """Restart the workers that ended by themselves; do nothing if all run."""
        self.when_running(_nothing)

    def when_running(self, then: Callable[[], None]) -> None:
        """Call `then` when all workers run: at once, or after the ended ones have been restarted."""
        lab, ended = self._workers, tuple(sorted(self._stopped))
        if lab is None or not ended:
            then()
            return
        self._then.append(then)
        if self._is_starting:
            return
        self._is_starting = True
        names = ", ".join(self.stopped)

        def begin() -> None:
            for device_id in ended:
                lab.restart(device_id)

        def show(_result: None) -> None:
            self._is_starting = False
            if self._workers is not lab:
                self._then.clear()
                return  # The lab was stopped meanwhile.
            self._stopped = set(lab.ended)
            self._show_stopped()
            # A worker that ended again meanwhile is not restarted endlessly. `worker_lost` tells it.
            if not self._stopped.isdisjoint(ended):
                self._then.clear()
                return
            self._notices.show(tr("Restarted {names}", names=names))
            self._go_on()

        def failed(error: EngineError) -> None:
            if self._workers is lab:
                # Those before the faulty one run.
                self._stopped = set(lab.ended)
                self._show_stopped()
            self._not_started(error)

        self._background.run(tr("Restarting {names}", names=names), begin, show, failed)

    def stop(self) -> None:
        """Stop the workers and remove them from the device list."""
        endpoints = self.endpoints
        self._end()
        self._live.set_devices(self._live.devices.without_endpoints(endpoints))

    def leave_unless_in(self, rig: Rig) -> None:
        """Stop the workers if none of them is in `rig`, the rig that the window shows next."""
        if self.endpoints.isdisjoint(device.endpoint for device in rig.devices):
            self._end()

    def close(self) -> None:
        """Stop the workers, and wait a bounded time for their exit."""
        self._closed = True
        # In the GUI thread: a background thread would end with the program, before its workers do.
        # The running ones first, since the others have been asked to end already.
        for lab in (self._workers, *self._ending):
            if lab is not None:
                lab.close()
        self._workers = None

    def _end(self) -> None:
        # Forgotten at once: the devices leave the list before the processes have ended.
        lab, self._workers = self._workers, None
        if lab is not None:
            self._stopped.clear()
            self._show_stopped()
            self._ending.append(lab)
            self._background.run(
                tr("Stopping lab workers (RPC workers on this computer)"),
                lab.close,
                lambda _: self._ending.remove(lab),
                self._notices.show_error,
            )
            self.running_changed.emit(False)

    def _on_worker_ended(self, worker: str, sentence: str) -> None:
        _log.warning("%s: %s", worker, sentence)
        if self._closed or self._workers is None:
            return
        self._stopped.add(worker)
        self._show_stopped()
        self.worker_lost.emit(sentence)

    def _show_stopped(self) -> None:
        lab = self._workers
        devices = () if lab is None else lab.rig.devices
        stopped = frozenset(
            device.endpoint for device in devices if device.id in self._stopped and device.endpoint is not None
        )
        self._live.set_stopped(stopped)
        self.stopped_changed.emit(self.stopped)


def _nothing(_result: None = None) -> None:
    """Do nothing. Used if the caller passes no callback."""
