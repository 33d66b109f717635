"""The rig as the next load finds it: the devices shown, with what is free on them beside the models loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from PySide6.QtCore import QObject, Signal

from app.rig.device_list import DeviceList
from app.rig.live_memory import LiveMemory, with_less_free
from engine.devices.device import Rig
from engine.fit.calibration import NO_CALIBRATION, Calibration
from engine.fit.loaded_models import HeldModel
from engine.language import tr
from engine.protocol.messages import DeviceMemoryReading
from engine.rigs.discovery import host_device
from engine.telemetry.sample import Sample

NOT_HERE = tr("from the rig file")


class LiveRig(QObject):
    """Puts list, samples, loaded models and calibration together; others say what each of them is."""

    rig_changed = Signal(Rig)
    """Devices, limits or free memory are not what they were."""
    devices_changed = Signal()
    """There are other devices than before. Comes before `rig_changed`."""
    samples_arrived = Signal(object)  # tuple[Sample, ...]

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.devices = DeviceList(Rig((), host_device()))
        self.memory = LiveMemory()
        self._rig = self.devices.rig
        self._current: HeldModel | None = None
        self._calibration = NO_CALIBRATION

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
        """Devices of a rig file that this machine does not have."""
        return self.devices.missing

    def rig_without(self, leaving: Sequence[HeldModel]) -> Rig:
        """Return the rig as a load finds it when `leaving` have gone, and everything else is as it is."""
        return self.memory.beside(self.devices.rig, leaving, from_file=self.devices.from_file)

    # ------------------------------------------------------------------ what it is made of

    def set_devices(self, devices: DeviceList) -> None:
        """Show these devices from now on."""
        before, self.devices = self.devices, replace(devices, rig=self._calibration.apply(devices.rig))
        if self.devices.has_other_devices(before):
            self.devices_changed.emit()
        self._show_rig()

    def set_calibration(self, calibration: Calibration) -> None:
        """Forecast with the overhead that was measured on the devices."""
        self._calibration = calibration
        # It is learnt from every load, and mostly the same as before.
        if calibration.apply(self.devices.rig) != self.devices.rig:
            self.set_devices(self.devices)

    def set_models(self, models: Sequence[HeldModel], current: HeldModel | None) -> None:
        """Tell what is loaded. `current` is what a load of the edited layout replaces: its memory counts as free."""
        taken_bytes = self.memory.set_models(models)
        if not self.devices.from_file:
            # Until the next samples tell.
            self._set_free(with_less_free(self.devices.rig, taken_bytes))
        self._current = current
        self._show_rig()

    def take_samples(self, samples: tuple[Sample, ...]) -> None:
        """Take the latest samples, tell them with their gaps filled, and follow what is free."""
        samples = self.memory.take(samples)
        missing = self.missing_devices
        self.samples_arrived.emit(
            tuple(replace(each, note=NOT_HERE) if each.device in missing else each for each in samples)
        )
        if not self.devices.from_file:
            self._set_free(self.memory.followed(self.devices.rig))
            self._show_rig()

    def take_engine_readings(self, readings: Sequence[DeviceMemoryReading]) -> None:
        """Take what a loaded model's child reads of its devices; a slot, as children tell in threads of their own."""
        self.memory.take_engine_readings(readings)

    def _set_free(self, rig: Rig) -> None:
        self.devices = replace(self.devices, rig=rig)

    def _show_rig(self) -> None:
        """Tell the rig as the edited layout finds it, where it has changed."""
        rig = self.rig_without([self._current] if self._current is not None else [])
        if rig != self._rig:
            self._rig = rig
            self.rig_changed.emit(rig)
