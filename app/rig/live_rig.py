"""The live rig: the listed devices, with the memory that will be free for the next load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from PySide6.QtCore import QObject, Signal

from app.rig.device_list import DeviceList
from engine.base.language import tr
from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig
from engine.devices.telemetry.sample import Sample, gap
from engine.machines.rigs.discovery import host_device
from engine.model.gguf.model_file import FileIdentity
from engine.planning.fit.calibration import NO_CALIBRATION, Calibration
from engine.planning.fit.loaded_models import HeldModel, rig_after_unload
from engine.planning.fit.speed_book import EMPTY_BOOK, SpeedBook
from engine.runtime.protocol.messages import DeviceMemoryReading

FREE_STEP_BYTES = 16 * MIB
"""Step in bytes: a smaller change of a device's free memory does not update the rig and the forecasts."""
_LARGE_SHARE = 64
"""Divisor of a device's memory: a change of free memory by at least 1/64 of it updates the rig at once.

On devices below 1 GiB it is also the smallest change that updates the rig. There the normal step of 16 MiB would be too
coarse, for instance for a worker of 160 MiB.
"""
FOLLOW_S = 5.0
"""Least seconds between two updates of the rig by changes of less than 1/64 (`_LARGE_SHARE`) of a device's memory.

Other programs change the host's free memory nearly every second, and each update computes all forecasts again.
"""


class LiveMemory:
    """Computes how much memory will be free for the next load, from the latest samples and the loaded models."""

    def __init__(self) -> None:
        self._models: tuple[HeldModel, ...] = ()
        self._engine: dict[str, DeviceMemoryReading] = {}
        self._free: dict[str, int] = {}
        self._read_s = 0.0
        self._followed_s: dict[str, float] = {}
        """By device id: time in seconds of the sample from which the device's free memory was last updated."""
        self._changed_s = -FOLLOW_S
        """Time in seconds of the last sample before the latest change of the list of loaded models."""
        self._before: dict[FileIdentity, dict[str, int]] = {}
        """Free bytes of each device before a load began, by the key of the model that is being loaded."""
        self._seen_own_bytes = 0
        """Bytes of host memory that our processes hold, according to the last samples.

        An unload frees at most this amount. It may free nothing if the weights of the model are mapped (mmap).
        """

    @property
    def free_bytes(self) -> Mapping[str, int]:
        """Exact free bytes by device id, from the last samples. Devices without a reading are left out."""
        return self._free

    def set_models(self, models: Sequence[HeldModel]) -> dict[str, int]:
        """Replace the loaded models, and return the change of used memory that the last samples do not show yet.

        The result has bytes by device id: positive after a load, negative after an unload. Memory of a new model that
        the samples already include is not counted.
        The host is left out: its samples show the memory of Layerdeck's processes separately.
        """
        before, self._models = self._models, tuple(models)
        if self._models != before:
            self._changed_s = self._read_s
        held = {device for model in models for device in model.held_bytes}
        self._engine = {device: reading for device, reading in self._engine.items() if device in held}
        grown = _held_bytes(self._models)
        grown.subtract(_held_bytes(before))
        for device, seen_bytes in self._seen_of_loads(before).items():
            grown[device] -= min(seen_bytes, max(0, grown[device]))
        self._note_begun(before, grown)
        return {device: size_bytes for device, size_bytes in grown.items() if size_bytes and device != CPU_ID}

    def _seen_of_loads(self, before: Sequence[HeldModel]) -> dict[str, int]:
        """Return, by device id, how many bytes of used memory in the last samples belong to newly loaded models.

        `before`: the loaded models before the call of `set_models` that is in progress.
        """
        held_before = {model.key for model in before if model.held_bytes}
        seen: Counter[str] = Counter()
        for model in self._models:
            if model.held_bytes and model.key not in held_before:
                begun = self._before.pop(model.key, {})
                for device, size_bytes in model.held_bytes.items():
                    # At most the growth since the load began: the samples may be older than its last allocations.
                    if device in begun and device in self._free:
                        seen[device] += min(size_bytes, max(0, begun[device] - self._free[device]))
        return seen

    def _note_begun(self, before: Sequence[HeldModel], grown: Mapping[str, int]) -> None:
        """Store how much memory is free on each device when a load begins.

        `before`: the loaded models before the call of `set_models` that is in progress.
        `grown`: by device id, how many more bytes the models use now than before; negative after an unload.
        """
        empty_before = {model.key for model in before if not model.held_bytes}
        loading = {model.key for model in self._models if not model.held_bytes}
        self._before = {key: free for key, free in self._before.items() if key in loading}
        for key in loading - (empty_before & self._before.keys()):
            self._before[key] = {device: free - grown.get(device, 0) for device, free in self._free.items()}

    def take_engine_readings(self, readings: Sequence[DeviceMemoryReading]) -> None:
        """Store readings of a model's child process, for devices whose memory this process cannot read itself.

        A CPU worker always reports all of its memory as free. Readings without used memory are therefore dropped.
        """
        self._engine.update({each.device: each for each in readings if each.free_bytes < each.total_bytes})

    def take(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """Store the latest samples and return them.

        Memory that a sample lacks is filled in from the readings of models' child processes.
        """
        filled = tuple(map(self._with_engine_reading, samples))
        self._read_s = max((sample.time_s for sample in filled), default=self._read_s)
        self._free = {
            sample.device: max(0, sample.total_bytes - sample.used_bytes)
            for sample in filled
            if sample.used_bytes is not None and sample.total_bytes is not None
        }
        # In steps as well: this number is part of the rig, and each change of the rig makes a forecast.
        own_bytes = next((each.own_bytes for each in filled if each.device == CPU_ID), None)
        if own_bytes is not None and abs(own_bytes - self._seen_own_bytes) >= FREE_STEP_BYTES:
            self._seen_own_bytes = own_bytes
            # `after_unload` adds it to the host's free memory, so both have to be from the same sample.
            self._followed_s.pop(CPU_ID, None)
        return filled

    def followed(self, rig: Rig) -> Rig:
        """Return `rig` with the free memory of the last samples, without small changes.

        Small changes are left out, because each change of the rig costs a forecast. A change is small if it is below
        `FREE_STEP_BYTES` and below 1/64 (`_LARGE_SHARE`) of the device's memory. In the `FOLLOW_S` seconds after an
        update of the device, each change below 1/64 is small. In the `FOLLOW_S` seconds after a load or unload, this
        second rule is off.
        """
        is_calm = self._read_s >= self._changed_s + FOLLOW_S

        def follow(device: Device) -> Device:
            now = self._free.get(device.id)
            # A forecast is made anew for each change of the rig, so small movements are not followed.
            step_bytes = min(FREE_STEP_BYTES, device.total_bytes // _LARGE_SHARE)
            if now is None:
                return device
            if device.free_bytes is not None:
                changed_bytes = abs(now - device.free_bytes)
                is_soon = is_calm and self._read_s < self._followed_s.get(device.id, -FOLLOW_S) + FOLLOW_S
                if changed_bytes < step_bytes or (is_soon and changed_bytes < device.total_bytes // _LARGE_SHARE):
                    return device
            self._followed_s[device.id] = self._read_s
            return replace(device, free_bytes=min(now, device.total_bytes))

        return Rig(tuple(map(follow, rig.devices)), follow(rig.host))

    def after_unload(self, rig: Rig, leaving: Sequence[HeldModel], *, from_file: bool) -> Rig:
        """Return `rig` with the memory that will be free after the models in `leaving` were unloaded.

        `from_file`: whether the free memory in `rig` is from a rig file. If so, the memory of models that stay loaded
        is subtracted here; otherwise the device readings exclude it already.
        """
        # Samples never update the memory of a rig file, so all of what stays loaded has to be subtracted here.
        if from_file:
            leaving_keys = {model.key for model in leaving}
            staying = [model for model in self._models if model.key not in leaving_keys]
            return rig_after_unload(with_less_free(rig, _with_shared(rig, _held_bytes(staying))), staying)
        return rig_after_unload(self._before_loads(rig, leaving), self._models, leaving, {CPU_ID: self._seen_own_bytes})

    def _before_loads(self, rig: Rig, leaving: Sequence[HeldModel]) -> Rig:
        """Return `rig` with the memory of unfinished loads of the models in `leaving` counted as free.

        The samples show this memory as used, but cancelling the loads frees it. So each device has at least as much
        free memory in the result as before these loads began.
        """
        begun = [self._before[model.key] for model in leaving if not model.held_bytes and model.key in self._before]

        def before(device: Device) -> Device:
            known = [free[device.id] for free in begun if device.id in free]
            if device.free_bytes is None or not known:
                return device
            return replace(device, free_bytes=min(max(device.free_bytes, *known), device.total_bytes))

        # The host's samples tell our own memory apart.
        return Rig(tuple(map(before, rig.devices)), rig.host) if begun else rig

    def reported(self, rig: Rig, *, from_file: bool) -> Rig:
        """Return `rig` with the free memory that devices report, which excludes the memory of all loaded models.

        `from_file`: whether the free memory in `rig` is from a rig file. If so, the memory of the loaded models is
        subtracted here; otherwise the device readings exclude it already.
        """
        return with_less_free(rig, _with_shared(rig, _held_bytes(self._models))) if from_file else rig

    def _with_engine_reading(self, sample: Sample) -> Sample:
        reading = self._engine.get(sample.device)
        if reading is None or sample.used_bytes is not None:
            return sample
        used_bytes = reading.total_bytes - reading.free_bytes
        return replace(sample, used_bytes=used_bytes, total_bytes=reading.total_bytes, note="")


def with_less_free(rig: Rig, taken_bytes: Mapping[str, int]) -> Rig:
    """Return `rig` with less free memory.

    `taken_bytes`: bytes to subtract by device id; negative numbers add memory.
    """

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


def _with_shared(rig: Rig, held_bytes: Counter[str]) -> Counter[str]:
    """Return `held_bytes` (by device id), with the bytes of devices that share the host's memory added to the host's.

    Devices share the host's memory on Apple silicon, for example.
    """
    shared_bytes = sum(held_bytes[device.id] for device in rig.devices if device.unified)
    return held_bytes + Counter({CPU_ID: shared_bytes})


def _without_memory_of(rig: Rig, endpoints: Collection[str]) -> Rig:
    """Return `rig` with the workers at these endpoints marked as stopped and without free memory."""

    def stop(device: Device) -> Device:
        return replace(device, free_bytes=0, is_stopped=True) if device.endpoint in endpoints else device

    return Rig(tuple(map(stop, rig.devices)), rig.host)


NOT_HERE = tr("not on this computer")
_SAME_HOST_SHARE = 0.1
"""Relative difference of host memory up to which a rig file is assumed to describe this computer."""


class LiveRig(QObject):
    """Computes the rig (all devices with their free memory) that forecasts and loads use.

    It combines the device list, memory samples, the loaded models, and the calibration (measured memory overheads).

    Used in the GUI thread only. `DeviceSearch` sets the devices, `Sampling` the memory samples, and `HeldMemory` the
    loaded models. `rig_changed` carries the resulting rig.
    """

    rig_changed = Signal(Rig)
    """Emitted when devices, limits or free memory have changed. Carries the rig for a load of the edited layout."""
    devices_changed = Signal()
    """Emitted before `rig_changed` when devices were added, removed, replaced or restarted."""
    samples_arrived = Signal(object)  # tuple[Sample, ...]

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.devices = DeviceList(Rig((), host_device()))
        self.memory = LiveMemory()
        self._rig = self.devices.rig
        self._current: HeldModel | None = None
        self._stopped: frozenset[str] = frozenset()
        self._calibration = NO_CALIBRATION
        self._book = EMPTY_BOOK
        self.n_files = 0
        """Number of device lists that `set_file` has set. A search compares it to notice that a file was opened."""
        self._was_searched = False
        self._then: list[Callable[[], None]] = []

    @property
    def rig(self) -> Rig:
        """All devices, with the memory that will be free for a load of the edited layout.

        The memory of the current model counts as free, because the load replaces it. Other loaded models stay.
        """
        return self._rig

    @property
    def is_real(self) -> bool:
        """Whether this computer has all local devices of the list. False if a rig file describes another computer."""
        return not self.missing_devices

    @property
    def missing_devices(self) -> tuple[str, ...]:
        """Ids of the rig file's devices that this machine does not have."""
        return self.devices.missing

    @property
    def stopped_devices(self) -> tuple[str, ...]:
        """Ids of the RPC workers on this computer (the lab rig) whose processes ended by themselves."""
        return tuple(device.id for device in self.devices.rig.devices if device.endpoint in self._stopped)

    def rig_without(self, leaving: Sequence[HeldModel]) -> Rig:
        """Return the rig with the memory that will be free after the models in `leaving` were unloaded.

        A stopped worker has no free memory, so no proposed layout uses it.
        """
        rig = self.memory.after_unload(self.devices.rig, leaving, from_file=self.devices.from_file)
        return _without_memory_of(rig, self._stopped) if self._stopped else rig

    def reported(self) -> Rig:
        """Return the rig with the free memory that devices report, which excludes the memory of all loaded models."""
        rig = self.memory.reported(self.devices.rig, from_file=self.devices.from_file)
        return _without_memory_of(rig, self._stopped) if self._stopped else rig

    # ------------------------------------------------------------------ what it is made of

    def when_searched(self, do: Callable[[], None]) -> None:
        """Call `do` when the first search, or the first reading of a rig file, has ended, successfully or not."""
        if self._was_searched:
            do()
        else:
            self._then.append(do)

    def end_search(self) -> None:
        """Call the callbacks of `when_searched`, since the first search for devices has ended, successfully or not.

        Called after `set_devices`.
        """
        self._was_searched = True
        waiting, self._then = self._then, []
        for do in waiting:
            do()

    def set_devices(self, devices: DeviceList) -> None:
        """Replace the device list, and emit `rig_changed` if the rig has changed.

        If devices were added, removed or replaced, `devices_changed` is emitted before `rig_changed`.
        """
        before, self.devices = self.devices, self._learnt(devices)
        if self.devices.has_other_devices(before):
            self.devices_changed.emit()
        self._show_rig()

    def set_file(self, devices: DeviceList) -> None:
        """Replace the device list by the devices of a rig file, or by devices with which the user only plans.

        Signals are emitted as by `set_devices`.
        """
        self.n_files += 1
        self.set_devices(devices)

    def set_stopped(self, endpoints: frozenset[str]) -> None:
        """Set the endpoints (host:port) of the RPC workers on this computer (the lab rig) that have stopped."""
        if endpoints != self._stopped:
            self._stopped = endpoints
            # Their processes are others now, which is what those who read the memory ask for.
            self.devices_changed.emit()
            self._show_rig()

    def set_calibration(self, calibration: Calibration) -> None:
        """Use the memory overheads of devices in `calibration` for forecasts from now on."""
        self._calibration = calibration
        # It is learnt from every load, and mostly the same as before.
        # Setting the devices emits signals and makes forecasts anew.
        self._refresh()

    def set_speed_book(self, book: SpeedBook) -> None:
        """Use `book` in later decisions: its measurements say, for instance, which number of threads is fastest."""
        self._book = book
        self._refresh()

    def _refresh(self) -> None:
        if self._learnt(self.devices).rig != self.devices.rig:
            self.set_devices(self.devices)

    def _learnt(self, devices: DeviceList) -> DeviceList:
        """Return `devices` with their measured memory overheads and fastest settings, such as the host's thread count.

        Devices of a rig file get no fastest settings: the file may describe another computer.
        """
        rig = self._calibration.apply(devices.rig)
        # A rig file may describe another computer, of which nothing was measured here.
        return replace(devices, rig=rig if devices.from_file else self._book.apply(rig))

    def set_models(self, models: Sequence[HeldModel], current: HeldModel | None) -> None:
        """Set the loaded models.

        `current`: the model that a load of the edited layout replaces, so its memory counts as free; None if there is
        none.
        """
        taken_bytes = self.memory.set_models(models)
        # A rig file's free memory is as written; `after_unload` subtracts the models.
        if not self.devices.from_file:
            # Until the next samples tell.
            self._set_free(with_less_free(self.devices.rig, taken_bytes))
        self._current = current
        self._show_rig()

    def take_samples(self, samples: tuple[Sample, ...]) -> None:
        """Store the latest samples, and update the free memory of the rig unless a rig file describes it.

        `samples_arrived` is emitted with the samples. Memory that a sample lacks is filled in from the readings of
        models' child processes.
        """
        samples = self.memory.take(samples)
        self.samples_arrived.emit(samples)
        if not self.devices.from_file:
            self._set_free(self.memory.followed(self.devices.rig))
            self._show_rig()

    def as_shown(self, sample: Sample) -> Sample:
        """Return `sample` as the window shows it.

        While a rig file describes the devices, samples of devices that this computer lacks get the note "not on this
        computer". The host's sample gets this note if the file's host has clearly more or less memory than this
        computer.
        """
        if sample.device in self.missing_devices:
            return replace(sample, note=NOT_HERE)
        host = self.devices.rig.host
        if not self.devices.from_file or sample.device != host.id or not sample.total_bytes:
            return sample
        # The same machine reports a little more or less after a reboot, or in another control group.
        if abs(sample.total_bytes - host.total_bytes) <= _SAME_HOST_SHARE * host.total_bytes:
            return sample
        return gap(sample.device, sample.time_s, NOT_HERE)

    def take_engine_readings(self, readings: Sequence[DeviceMemoryReading]) -> None:
        """Store the memory readings of a loaded model's child process.

        A Qt slot of this object, so that a signal from another thread runs it in the GUI thread.
        """
        self.memory.take_engine_readings(readings)

    def _set_free(self, rig: Rig) -> None:
        self.devices = replace(self.devices, rig=rig)

    def _show_rig(self) -> None:
        """Emit `rig_changed` if the rig for a load of the edited layout has changed."""
        rig = self.rig_without([self._current] if self._current is not None else [])
        if rig != self._rig:
            self._rig = rig
            self.rig_changed.emit(rig)
