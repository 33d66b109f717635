"""The rig of the window: this machine's devices, a lab, remote workers, their limits and live memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from PySide6.QtCore import QObject, Qt, Signal

from app.background import Background
from app.demo import ensure_demo
from app.limit_book import LimitBook
from app.live_memory import LiveMemory, with_less_free
from app.paths import self_test_path
from engine.devices.device import Device, Rig
from engine.devices.rig_file import encode_rig, read_rig
from engine.errors import EngineError, RigError
from engine.fit.calibration import NO_CALIBRATION, Calibration
from engine.fit.loaded_models import LoadedModel
from engine.runner.discovery import discover, host_device
from engine.runner.lab import LabRig
from engine.runner.protocol import DeviceMemoryReading
from engine.runner.self_test import keep_verdict, read_verdicts, try_repeated, with_verdicts
from engine.telemetry.cards import read_card_facts, with_display_margins
from engine.telemetry.readings import DeviceReadings
from engine.telemetry.rpc_worker import WorkerProcess
from engine.telemetry.sample import Sample
from engine.telemetry.sampler import Sampler

_T = TypeVar("_T")
_log = logging.getLogger("layerdeck.rig")

SAMPLER_STOP_S = 0.5
NOT_HERE = "from the rig file"


class RigKeeper(QObject):
    """Owns lab workers and sampler. `rig_changed` carries a new `Rig` when devices, limits or free memory changed."""

    rig_changed = Signal(Rig)
    samples_arrived = Signal(object)  # tuple[Sample, ...]
    failed = Signal(EngineError)
    lab_changed = Signal(bool)  # whether lab workers run
    worker_lost = Signal(str)
    said = Signal(str)  # what was done, for people

    _sampled = Signal(object)
    _worker_ended = Signal(str, str)

    def __init__(
        self, background: Background, parent: QObject | None = None, *, limits: LimitBook | None = None
    ) -> None:
        super().__init__(parent)
        self._background = background
        self._limits = limits or LimitBook()
        self._found = Rig((), host_device())
        """The devices with the free memory that they report."""
        self._rig = self._found
        self.memory = LiveMemory()
        self._current: LoadedModel | None = None
        self._lab: LabRig | None = None
        self._readings = DeviceReadings(self._found.all_devices)
        self._sampler = Sampler(self._readings, self._sampled.emit)
        self._calibration = NO_CALIBRATION
        self._from_file = False
        self._starting_lab = False
        self._here: frozenset[tuple[str, str | None]] = frozenset()
        self._closed = False
        self._sampled.connect(self._on_sampled, Qt.ConnectionType.QueuedConnection)
        self._worker_ended.connect(self._on_worker_ended, Qt.ConnectionType.QueuedConnection)

    @property
    def rig(self) -> Rig:
        """The devices as a load of the edited layout finds them, beside other models of ours."""
        return self._rig

    @property
    def is_real(self) -> bool:
        """Whether the devices can be asked: a rig file may describe hardware that is not here."""
        return not self.missing_devices

    @property
    def missing_devices(self) -> tuple[str, ...]:
        """Devices of a rig file that this machine does not have; workers elsewhere are asked when they are needed."""
        if not self._from_file:
            return ()
        local = (device for device in self._found.devices if not device.is_rpc)
        return tuple(device.id for device in local if (device.id, device.pci_bus_id) not in self._here)

    def start(self, rig: Path | None = None) -> None:
        """Begin sampling; use the devices of the rig file `rig`, else this machine's."""
        self._sampler.start()
        if rig is None:
            self.refresh()
        else:
            self.open_rig(rig)

    def close(self) -> None:
        """Stop sampling and end the lab workers."""
        self._closed = True
        # The sampler's thread ends by itself; a reading that hangs is not waited for.
        self._sampler.stop(SAMPLER_STOP_S)
        if self._lab is not None:
            self._lab.close()
            self._lab = None

    # ------------------------------------------------------------------ where devices come from

    def refresh(self) -> None:
        """Look for this machine's devices again; lab and remote workers stay."""

        def show(found: Rig) -> None:
            self._remember_local(found)
            self._from_file = False
            workers = tuple(device for device in self._found.devices if device.is_rpc)
            known = {device.id: device for device in self._found.devices}
            local = tuple(self._with_limits(device, known.get(device.id)) for device in found.devices)
            self._set_rig(Rig((*local, *workers), self._with_limits(found.host, self._found.host)))

        def find() -> Rig:
            rig = discover()
            rig = with_display_margins(rig, read_card_facts(rig.devices))
            return with_verdicts(rig, read_verdicts(self_test_path()))

        self._run("Looking for devices", find, show)

    def test_repeats(self) -> None:
        """Try whether local devices are safe as several entries of a layout, one for each backend, and say so."""
        rig = self._found
        tested = {device.backend: device for device in rig.devices if not device.is_rpc}
        if not tested:
            self.said.emit("There is no local GPU to test; CPU and remote devices may always come twice.")
            return

        def test() -> str:
            model, path = ensure_demo(), self_test_path()
            sentences = []
            for device in tested.values():
                result = try_repeated(rig, device.id, model)
                keep_verdict(path, device, result)
                verdict = "may" if result.passed else "cannot"
                sentences.append(f"{device.backend} devices {verdict} come twice in a layout.")
            return " ".join(sentences)

        def show(sentence: str) -> None:
            self.said.emit(sentence)
            self.refresh()

        self._run("Testing devices", test, show)

    def open_rig(self, path: Path) -> None:
        """Use the devices that the rig file `path` describes."""

        def read() -> tuple[Rig, Rig]:
            rig = read_rig(path)
            # Found anew, to know which of the file's devices are here.
            return rig, discover() if any(not device.is_rpc for device in rig.devices) else Rig((), rig.host)

        def show(rigs: tuple[Rig, Rig]) -> None:
            rig, found = rigs
            self._remember_local(found)
            self._from_file = True
            self._leave_lab_unless_in(rig)
            self._set_rig(rig)
            self.said.emit(f"The devices are those of {path.name}")

        self._run(f"Reading {path.name}", read, show)

    def save_rig(self, path: Path) -> None:
        """Write the rig file of the devices shown."""
        document = encode_rig(self._found)

        def write() -> None:
            try:
                path.write_bytes(document + b"\n")
            except OSError as error:
                raise RigError(f"Could not write {path.name}: {error.strerror}. Choose another place.") from error

        self._run(f"Saving {path.name}", write, lambda _: self.said.emit(f"Saved {path.name}"))

    def start_lab(self, caps_bytes: Sequence[int], then: Callable[[], None] | None = None) -> None:
        """Start capped RPC workers on this machine and add them as devices."""
        if self._lab is not None:
            if then is not None:
                then()
            return
        if self._starting_lab:
            return
        self._starting_lab = True

        def begin() -> LabRig:
            lab = LabRig(caps_bytes, on_worker_ended=self._worker_ended.emit)
            lab.start()
            return lab

        def not_started(error: EngineError) -> None:
            self._starting_lab = False
            self.failed.emit(error)

        def show(lab: LabRig) -> None:
            self._starting_lab = False
            self._lab = lab
            self._add(lab.rig.devices)
            self.said.emit(f"Lab workers started: {len(lab.rig.devices)}")
            self.lab_changed.emit(True)
            if then is not None:
                then()

        self._background.run("Starting lab workers", begin, show, not_started)

    def stop_lab(self) -> None:
        """End the lab workers and take them out of the rig."""
        endpoints = self.lab_endpoints
        self._end_lab()
        self._set_rig(
            Rig(tuple(each for each in self._found.devices if each.endpoint not in endpoints), self._found.host)
        )

    @property
    def lab_endpoints(self) -> frozenset[str]:
        """Where the lab's workers listen; empty without a lab."""
        devices = () if self._lab is None else self._lab.rig.devices
        return frozenset(device.endpoint for device in devices if device.endpoint is not None)

    def _end_lab(self) -> None:
        lab, self._lab = self._lab, None
        if lab is not None:
            self._run("Stopping lab workers", lab.close, lambda _: None)
            self.lab_changed.emit(False)

    def _leave_lab_unless_in(self, rig: Rig) -> None:
        """End the lab when `rig` has none of its workers: nothing would show that it runs."""
        if self.lab_endpoints.isdisjoint(device.endpoint for device in rig.devices):
            self._end_lab()

    def _remember_local(self, found: Rig) -> None:
        self._here = frozenset((device.id, device.pci_bus_id) for device in found.devices if not device.is_rpc)

    def add_remote(self, endpoint: str) -> None:
        """Ask the RPC worker at `endpoint` (host:port) for its devices and add them."""
        if endpoint in {device.endpoint for device in self._found.devices}:
            self.failed.emit(RigError(f"{endpoint} is already among the devices."))
            return

        def show(found: Rig) -> None:
            self._add(tuple(self._limits.apply(device) for device in found.devices if device.endpoint == endpoint))
            self.said.emit(f"Added {endpoint}")

        self._run(f"Asking {endpoint}", lambda: discover((endpoint,)), show)

    def remove(self, device_id: str) -> None:
        """Take a device out of the rig; it is not touched."""
        self._set_rig(Rig(tuple(device for device in self._found.devices if device.id != device_id), self._found.host))

    def set_limits(self, device_id: str, cap_bytes: int | None, margin_bytes: int) -> None:
        """Set how much of a device may be planned."""

        def limited(device: Device) -> Device:
            return replace(device, cap_bytes=cap_bytes, margin_bytes=margin_bytes) if device.id == device_id else device

        self._set_rig(Rig(tuple(limited(device) for device in self._found.devices), limited(self._found.host)))
        device = self._found.device(device_id)
        if device is not None and not self._from_file and device.endpoint not in self.lab_endpoints:
            self._limits.keep(device)

    def _with_limits(self, device: Device, known: Device | None) -> Device:
        """Return a device that was found, with the limits that people gave it, lately or in an earlier run."""
        kept = self._limits.apply(device)
        if known is None or kept is not device:
            return kept
        return replace(device, cap_bytes=known.cap_bytes, margin_bytes=known.margin_bytes)

    def _run(self, what: str, function: Callable[[], _T], show: Callable[[_T], None]) -> None:
        self._background.run(what, function, show, self.failed.emit)

    def _add(self, devices: Sequence[Device]) -> None:
        taken = set(self._found.ids)
        added = []
        for device in devices:
            device_id = device.id
            number = 0
            while device_id in taken:
                device_id = f"RPC{number}" if device.is_rpc else f"{device.id}-{number}"
                number += 1
            taken.add(device_id)
            added.append(replace(device, id=device_id))
        self._set_rig(Rig((*self._found.devices, *added), self._found.host))

    def set_calibration(self, calibration: Calibration) -> None:
        """Forecast with the overhead that was measured on the devices."""
        self._calibration = calibration
        if calibration.apply(self._found) != self._found:
            self._set_rig(self._found)

    def _set_rig(self, rig: Rig) -> None:
        rig = self._calibration.apply(rig)
        devices_changed = _identity(rig) != _identity(self._found)
        self._found = rig
        if devices_changed:
            self._follow_devices()
        self._show_rig()

    # ------------------------------------------------------------------ live memory

    def set_models(self, models: Sequence[LoadedModel], current: LoadedModel | None) -> None:
        """Tell what is loaded. `current` is what a load of the edited layout replaces: its memory counts as free."""
        taken_bytes = self.memory.set_models(models)
        if not self._from_file:
            # Until the next samples tell.
            self._found = with_less_free(self._found, taken_bytes)
        self._current = current
        self._show_rig()

    def rig_without(self, leaving: Sequence[LoadedModel]) -> Rig:
        """Return the rig as a load finds it when `leaving` have gone, and everything else is as it is."""
        return self.memory.beside(self._found, leaving, from_file=self._from_file)

    def show_engine_memory(self, readings: Sequence[DeviceMemoryReading]) -> None:
        """Take what a loaded model's child reads of its devices; a slot, as children tell in threads of their own."""
        self.memory.take_engine_readings(readings)

    def _follow_devices(self) -> None:
        self._readings.set_devices(self._found.all_devices, {} if self._lab is None else _processes(self._lab))

    def _on_sampled(self, samples: tuple[Sample, ...]) -> None:
        if self._closed:
            return
        samples = self.memory.take(samples)
        missing = self.missing_devices
        self.samples_arrived.emit(
            tuple(replace(each, note=NOT_HERE) if each.device in missing else each for each in samples)
        )
        if not self._from_file:
            self._found = self.memory.followed(self._found)
            self._show_rig()

    def _show_rig(self) -> None:
        """Tell the rig as the edited layout finds it, where it has changed."""
        rig = self.rig_without([self._current] if self._current is not None else [])
        if rig != self._rig:
            self._rig = rig
            self.rig_changed.emit(rig)

    def _on_worker_ended(self, worker: str, sentence: str) -> None:
        _log.warning("%s: %s", worker, sentence)
        if not self._closed:
            self.worker_lost.emit(sentence)


def _processes(lab: LabRig) -> dict[str, WorkerProcess]:
    """Return the processes of the lab's workers by endpoint."""
    found = {device.endpoint: (device.id, lab.pid(device.id)) for device in lab.rig.devices}
    return {
        endpoint: WorkerProcess(pid, lab.baseline_bytes(device_id))
        for endpoint, (device_id, pid) in found.items()
        if endpoint is not None and pid is not None
    }


def _identity(rig: Rig) -> tuple[tuple[str, str | None, str | None], ...]:
    return tuple((device.id, device.endpoint, device.pci_bus_id) for device in rig.all_devices)
