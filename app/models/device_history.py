"""The last hour of memory readings of each device, with marks for loads, answers and failures."""

from __future__ import annotations

import time
from collections import defaultdict, deque

from PySide6.QtCore import QObject, Signal

from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.rig.live_rig import LiveRig
from engine.base.language import tr
from engine.devices.telemetry.sample import Sample
from engine.runtime.session.events import OutOfMemory
from widgets.devices.readings import Mark

HISTORY_S = 3600.0
MAX_SAMPLES = 3600
"""Largest number of readings per device, one a second. 3,600 readings take about 1 MB."""
MAX_MARKS = 500


class DeviceHistory(QObject):
    """Records memory readings of all devices, so that the details of a device can show the last hour."""

    recorded = Signal(object)  # tuple[Sample, ...]
    marked = Signal(Mark)

    def __init__(self, live: LiveRig, models: OpenModels, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._live = live
        self._samples: defaultdict[str, deque[Sample]] = defaultdict(lambda: deque(maxlen=MAX_SAMPLES))
        self._marks: deque[Mark] = deque(maxlen=MAX_MARKS)
        live.samples_arrived.connect(self._on_samples)
        for model in models.all:
            self._follow(model)
        models.added.connect(self._follow)

    def samples(self, device_id: str) -> tuple[Sample, ...]:
        """Return the readings of a device in the last hour, oldest first."""
        return tuple(self._samples[device_id])

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Loads, answers and failures, oldest first; at most `MAX_MARKS`."""
        return tuple(self._marks)

    def _on_samples(self, samples: tuple[Sample, ...]) -> None:
        shown = tuple(map(self._live.as_shown, samples))
        for sample in shown:
            kept = self._samples[sample.device]
            kept.append(sample)
            while kept[0].time_s < sample.time_s - HISTORY_S:
                kept.popleft()
        for device in self._samples.keys() - {sample.device for sample in samples}:
            del self._samples[device]
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
        mark = Mark(time.monotonic(), text)
        self._marks.append(mark)
        self.marked.emit(mark)
