"""The last samples of each device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from engine.telemetry.sample import Sample

DEFAULT_LENGTH = 120


class History:
    """Keeps the newest `length` samples per device, gaps included."""

    def __init__(self, length: int = DEFAULT_LENGTH) -> None:
        self._length = length
        self._samples: dict[str, deque[Sample]] = {}

    def add(self, samples: Iterable[Sample]) -> None:
        """Append samples, the oldest of a full device drop out."""
        for sample in samples:
            self._samples.setdefault(sample.device, deque(maxlen=self._length)).append(sample)

    def keep_only(self, devices: Iterable[str]) -> None:
        """Forget devices that are not among these."""
        kept = set(devices)
        self._samples = {device: samples for device, samples in self._samples.items() if device in kept}

    def samples(self, device: str) -> tuple[Sample, ...]:
        """Return the device's samples, oldest first."""
        return tuple(self._samples.get(device, ()))

    def latest(self, device: str) -> Sample | None:
        """Return the newest sample, None before the first."""
        samples = self._samples.get(device)
        return samples[-1] if samples else None
