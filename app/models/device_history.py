"""The last hour of memory readings of each device, with marks for loads, answers and failures."""

from __future__ import annotations

import time
from array import array
from collections import deque
from math import isnan, nan
from typing import Any

from PySide6.QtCore import QObject, Signal

from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.rig.live_rig import LiveRig
from engine.base.language import tr
from engine.devices.telemetry.sample import CardState, Sample
from engine.runtime.session.events import OutOfMemory
from widgets.devices.readings import PlotEvent

HISTORY_S = 3600.0
MAX_SAMPLES = 3600
"""Largest number of stored readings per device. There is one a second."""
MAX_MARKS = 500


class _Readings:
    """The last `MAX_SAMPLES` readings of one device, in arrays of 0.3 MB that are allocated at the start.

    `Sample` objects would take 1 MB, and memory would grow during the first hour.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._values = array("d", [nan]) * (MAX_SAMPLES * len(_NUMBERS))
        # Nearly always the same as in the reading before: then it is the same object.
        self._rest: deque[tuple[str, CardState | None]] = deque(maxlen=MAX_SAMPLES)
        self._end = 0

    def add(self, sample: Sample) -> None:
        """Append a reading, and drop readings that are older than `HISTORY_S`."""
        begin = self._end % MAX_SAMPLES * len(_NUMBERS)
        values = (getattr(sample, name) for name in _NUMBERS)
        self._values[begin : begin + len(_NUMBERS)] = array("d", [nan if each is None else each for each in values])
        self._end += 1
        rest = sample.note, sample.card
        self._rest.append(self._rest[-1] if self._rest and self._rest[-1] == rest else rest)
        while self._time_s(0) < sample.time_s - HISTORY_S:
            self._rest.popleft()

    def all(self) -> tuple[Sample, ...]:
        """Return the readings, oldest first."""
        return tuple(map(self._sample, range(len(self._rest))))

    def _begin(self, index: int) -> int:
        return (self._end - len(self._rest) + index) % MAX_SAMPLES * len(_NUMBERS)

    def _time_s(self, index: int) -> float:
        return self._values[self._begin(index)]

    def _sample(self, index: int) -> Sample:
        begin = self._begin(index)
        values = dict(zip(_NUMBERS, self._values[begin : begin + len(_NUMBERS)], strict=True))
        known: dict[str, Any] = {
            name: None if isnan(value) else int(value) if name in _WHOLE else value for name, value in values.items()
        }
        note, card = self._rest[index]
        return Sample(self._device, note=note, card=card, **known)


_WHOLE = frozenset({"used_bytes", "total_bytes", "own_bytes", "spilled_bytes", "major_faults"})
_NUMBERS = ("time_s", *sorted(_WHOLE), "utilization_percent", "temperature_c", "power_w")
"""The fields of `Sample` that are numbers. All are stored as floats, which are exact for whole numbers up to 2^53."""


class DeviceHistory(QObject):
    """Records memory readings of all devices, so that the details of a device can show the last hour."""

    recorded = Signal(object)  # tuple[Sample, ...]
    marked = Signal(PlotEvent)

    def __init__(self, live: LiveRig, models: OpenModels, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._live = live
        self._readings: dict[str, _Readings] = {}
        self._marks: deque[PlotEvent] = deque(maxlen=MAX_MARKS)
        live.samples_arrived.connect(self._on_samples)
        for model in models.all:
            self._follow(model)
        models.added.connect(self._follow)

    def samples(self, device_id: str) -> tuple[Sample, ...]:
        """Return the readings of a device in the last hour, oldest first."""
        readings = self._readings.get(device_id)
        return () if readings is None else readings.all()

    @property
    def marks(self) -> tuple[PlotEvent, ...]:
        """Loads, answers and failures, oldest first; at most `MAX_MARKS`."""
        return tuple(self._marks)

    def _on_samples(self, samples: tuple[Sample, ...]) -> None:
        shown = tuple(map(self._live.as_shown, samples))
        for sample in shown:
            if sample.device not in self._readings:
                self._readings[sample.device] = _Readings(sample.device)
            self._readings[sample.device].add(sample)
        # Devices that were removed: an id such as RPC0 may belong to another device later.
        for device in self._readings.keys() - {sample.device for sample in samples}:
            del self._readings[device]
        self.recorded.emit(shown)

    def _follow(self, model: OpenModel) -> None:
        model.loading.loaded_changed.connect(
            lambda loaded: self._mark(
                tr("{model} unloaded", model=model.name) if loaded is None else tr("{model} loaded", model=model.name)
            )
        )
        model.loading.ended.connect(lambda ending: self._on_ended(model, ending))
        model.conversation.answer_finished.connect(lambda _done: self._mark(tr("{model} answered", model=model.name)))

    def _on_ended(self, model: OpenModel, ending: object) -> None:
        if isinstance(ending, OutOfMemory):
            self._mark(tr("{model}: out of memory", model=model.name))

    def _mark(self, text: str) -> None:
        mark = PlotEvent(time.monotonic(), text)
        self._marks.append(mark)
        self.marked.emit(mark)
