"""The rig as the next load finds it: the devices shown, with what is free on them beside the models loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from PySide6.QtCore import QObject, Signal

from app.rig.device_list import DeviceList
from engine.base.language import tr
from engine.base.units import MIB
from engine.devices.device import CPU_ID, Device, Rig
from engine.devices.telemetry.sample import Sample
from engine.machines.rigs.discovery import host_device
from engine.model.gguf.model_file import FileIdentity
from engine.planning.fit.calibration import NO_CALIBRATION, Calibration
from engine.planning.fit.loaded_models import HeldModel, rig_beside
from engine.runtime.protocol.messages import DeviceMemoryReading

FREE_STEP_BYTES = 16 * MIB
"""Free memory is followed in steps of this size, so that forecasts do not flicker with every page that moves."""
_STEPS = 64
"""Steps that a small device has at least: on a worker of 160 MiB a step of 16 would hide what is left."""


class LiveMemory:
    """The latest samples and the loaded models, which together say what the next load finds."""

    def __init__(self) -> None:
        self._models: tuple[HeldModel, ...] = ()
        self._engine: dict[str, DeviceMemoryReading] = {}
        self._free: dict[str, int] = {}
        self._before: dict[FileIdentity, dict[str, int]] = {}
        """What was free on each device before a model was loaded."""
        self._seen_own_bytes = 0
        """What our processes are seen to hold of the host: of a file that is only mapped nothing comes back."""

    @property
    def endpoints(self) -> frozenset[str]:
        """Workers that our models hold: they serve one client and must not be asked."""
        return frozenset().union(*(model.endpoints for model in self._models))

    @property
    def free_bytes(self) -> Mapping[str, int]:
        """What was free on each device that could be read last, to the byte."""
        return self._free

    def set_models(self, models: Sequence[HeldModel]) -> dict[str, int]:
        """Replace what is loaded; return by how many bytes the next samples will show more used than the last ones.

        What samples have shown already while a model was loaded is not counted again. Not of the host: of what a model
        has there, the samples tell how much is held.
        """
        before, self._models = self._models, tuple(models)
        held = {device for model in models for device in model.held_bytes}
        self._engine = {device: reading for device, reading in self._engine.items() if device in held}
        grown = _held_bytes(self._models)
        grown.subtract(_held_bytes(before))
        for device, seen_bytes in self._seen_of_loads(before).items():
            grown[device] -= min(seen_bytes, max(0, grown[device]))
        self._note_begun(before, grown)
        return {device: size_bytes for device, size_bytes in grown.items() if size_bytes and device != CPU_ID}

    def _seen_of_loads(self, before: Sequence[HeldModel]) -> dict[str, int]:
        """Return what the samples have shown so far of loads that have just ended."""
        held_before = {model.key for model in before if model.held_bytes}
        seen: Counter[str] = Counter()
        for model in self._models:
            if model.held_bytes and model.key not in held_before:
                begun = self._before.pop(model.key, {})
                for device, size_bytes in model.held_bytes.items():
                    if device in begun and device in self._free:
                        seen[device] += min(size_bytes, max(0, begun[device] - self._free[device]))
        return seen

    def _note_begun(self, before: Sequence[HeldModel], grown: Mapping[str, int]) -> None:
        """Note what is free, with what comes back now, where a load begins or what was loaded before it went."""
        empty_before = {model.key for model in before if not model.held_bytes}
        loading = {model.key for model in self._models if not model.held_bytes}
        self._before = {key: free for key, free in self._before.items() if key in loading}
        for key in loading - (empty_before & self._before.keys()):
            self._before[key] = {device: free - grown.get(device, 0) for device, free in self._free.items()}

    def take_engine_readings(self, readings: Sequence[DeviceMemoryReading]) -> None:
        """Take what a loaded model's child reads of its devices, for those that nobody else can read.

        A CPU worker reports all of its memory as free, whatever is used: that is no reading.
        """
        self._engine.update({each.device: each for each in readings if each.free_bytes < each.total_bytes})

    def take(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """Take the latest samples and return them with their gaps filled by the children's readings."""
        filled = tuple(map(self._with_engine_reading, samples))
        self._free = {
            sample.device: max(0, sample.total_bytes - sample.used_bytes)
            for sample in filled
            if sample.used_bytes is not None and sample.total_bytes is not None
        }
        own_bytes = next((each.own_bytes for each in filled if each.device == CPU_ID), None)
        if own_bytes is not None and abs(own_bytes - self._seen_own_bytes) >= FREE_STEP_BYTES:
            self._seen_own_bytes = own_bytes
        return filled

    def followed(self, rig: Rig) -> Rig:
        """Return `rig` with the free memory that was read, where it has moved by a step."""

        def follow(device: Device) -> Device:
            now = self._free.get(device.id)
            step_bytes = min(FREE_STEP_BYTES, device.total_bytes // _STEPS)
            if now is None or (device.free_bytes is not None and abs(now - device.free_bytes) < step_bytes):
                return device
            return replace(device, free_bytes=min(now, device.total_bytes))

        return Rig(tuple(map(follow, rig.devices)), follow(rig.host))

    def beside(self, rig: Rig, leaving: Sequence[HeldModel], *, from_file: bool) -> Rig:
        """Return `rig` as a load finds it when `leaving` have gone.

        `from_file`: its free memory was written down and knows nothing of what we have loaded since.
        """
        if from_file:
            gone = {model.key for model in leaving}
            staying = [model for model in self._models if model.key not in gone]
            return rig_beside(with_less_free(rig, _held_bytes(staying)), staying)
        return rig_beside(rig, self._models, leaving, {CPU_ID: self._seen_own_bytes})

    def _with_engine_reading(self, sample: Sample) -> Sample:
        reading = self._engine.get(sample.device)
        if reading is None or sample.used_bytes is not None:
            return sample
        used_bytes = reading.total_bytes - reading.free_bytes
        return replace(sample, used_bytes=used_bytes, total_bytes=reading.total_bytes, note="")


def with_less_free(rig: Rig, taken_bytes: Mapping[str, int]) -> Rig:
    """Return `rig` with so much less free on each device; a negative number is given back."""

    def less(device: Device) -> Device:
        size_bytes = taken_bytes.get(device.id, 0)
        if device.free_bytes is None or not size_bytes:
            return device
        return replace(device, free_bytes=min(max(0, device.free_bytes - size_bytes), device.total_bytes))

    return Rig(tuple(map(less, rig.devices)), less(rig.host))


def _held_bytes(models: Sequence[HeldModel]) -> Counter[str]:
    held: Counter[str] = Counter()
    for model in models:
        held.update(model.held_bytes)
    return held


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
