"""Watches the free memory of devices while a model is loaded, and warns before it runs out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal

from msgspec import Struct

from engine.base.language import tr
from engine.base.units import GIB, MIB, format_bytes
from engine.devices.device import Device
from engine.devices.telemetry.sample import Sample

AlertKind = Literal["low", "falling", "spilled", "paging"]

FLOOR_BYTES = 128 * MIB
FLOOR_SHARE = 0.02
"""Free memory counts as low if it is less than this share of a device's total memory, and less than `FLOOR_BYTES`.

The limit is higher for a device with a margin (`warning_bytes`).
"""
WINDOW_S = 20.0
FALL_SOON_S = 45.0
"""Free memory counts as falling if it would be used up within this many seconds at its present rate.

The rate is that of the last `WINDOW_S` seconds.
"""
FALL_BYTES = 64 * MIB
SPILL_BYTES = 64 * MIB
PAGING_PER_S = 200.0
PAGING_FREE_BYTES = 2 * GIB
PAGING_FREE_SHARE = 0.1
"""Page faults cause alerts only if less than this share of the memory is free, and less than `PAGING_FREE_BYTES`.

With more free memory, page faults come from the first read of a file.
"""
_BEGIN_AFTER = 2
_END_AFTER = 3
"""Number of consecutive samples without a problem after which its alert ends.

An alert begins after `_BEGIN_AFTER` consecutive samples with the problem.
"""


class Alert(Struct, frozen=True):
    """A memory problem of a device. `message`: a sentence with the remedy."""

    device: str
    kind: AlertKind
    message: str


class HeadroomWatch:
    """Derives alerts on low memory from samples while a model is loaded. Not thread-safe."""

    def __init__(self) -> None:
        self._devices: dict[str, _DeviceWatch] = {}

    def begin(self, devices: Iterable[Device]) -> None:
        """Watch these devices from now on. The next sample of each device counts as its state right after the load."""
        self._devices = {device.id: _DeviceWatch(device) for device in devices}

    def update(self, samples: Iterable[Sample]) -> tuple[Alert, ...]:
        """Return the alerts after these readings, at most one for each device, in the order of the samples."""
        alerts: list[Alert] = []
        for sample in samples:
            watch = self._devices.get(sample.device)
            if watch is not None:
                alerts.extend(watch.update(sample))
        return tuple(alerts)


class _DeviceWatch:
    """The samples of one device since the load, and the alerts that follow from them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._first: Sample | None = None
        self._window: deque[Sample] = deque()
        self._standing: dict[AlertKind, int] = {}
        """Number of consecutive samples by kind of problem: positive if they show the problem,
        negative if they do not.
        """
        self._raised: set[AlertKind] = set()

    def update(self, sample: Sample) -> list[Alert]:
        if sample.used_bytes is None or not sample.total_bytes:
            return []
        if self._first is None:
            self._first = sample
        self._window.append(sample)
        while sample.time_s - self._window[0].time_s > WINDOW_S:
            self._window.popleft()
        alerts = []
        for kind, find in self._checks().items():
            message = find(sample)
            if self._stands(kind, message is not None):
                # An alert outlasts its problem by some readings, in which there is no message for it.
                alerts.append(Alert(sample.device, kind, message or _recovering(sample)))
        return alerts[:1]

    def _checks(self) -> dict[AlertKind, Callable[[Sample], str | None]]:
        # The most specific first, because only one alert for each device is shown.
        return {"spilled": self._spilled, "paging": self._paging, "low": self._low, "falling": self._falling}

    def _stands(self, kind: AlertKind, wrong: bool) -> bool:
        count = self._standing.get(kind, 0)
        # A reading of the other kind begins the count anew.
        count = (max(count, 0) + 1) if wrong else (min(count, 0) - 1)
        self._standing[kind] = count
        if count >= _BEGIN_AFTER:
            self._raised.add(kind)
        elif count <= -_END_AFTER:
            self._raised.discard(kind)
        return kind in self._raised

    # ------------------------------------------------------------------ what can be wrong

    def _low(self, sample: Sample) -> str | None:
        free_bytes = _free_bytes(sample)
        if free_bytes >= warning_bytes(self._device, sample.total_bytes):
            return None
        return tr(
            "{device} has only {free} of memory left. {who}Close programs that use {device}, or move layers off "
            "{device}, before an answer runs out of memory.",
            device=sample.device,
            free=format_bytes(free_bytes),
            who=self._who(sample),
        )

    def _falling(self, sample: Sample) -> str | None:
        oldest = self._window[0]
        seconds = sample.time_s - oldest.time_s
        fallen_bytes = _free_bytes(oldest) - _free_bytes(sample)
        if fallen_bytes < FALL_BYTES or seconds <= 0:
            return None
        # As if memory went on falling at the mean pace of the window.
        left_s = _free_bytes(sample) * seconds / fallen_bytes
        if left_s > FALL_SOON_S:
            return None
        return tr(
            "{device} memory is filling up: {fallen} more in use than {seconds:.0f} s ago, {free} left. {who}Close "
            "other programs.",
            device=sample.device,
            fallen=format_bytes(fallen_bytes),
            seconds=seconds,
            free=format_bytes(_free_bytes(sample)),
            who=self._who(sample),
        )

    def _spilled(self, sample: Sample) -> str | None:
        first = self._first
        if sample.spilled_bytes is None or first is None or first.spilled_bytes is None:
            return None
        grown_bytes = sample.spilled_bytes - first.spilled_bytes
        if grown_bytes < SPILL_BYTES:
            return None
        where = tr("to swap") if self._device.is_host else tr("to the computer's memory")
        return tr(
            "{size} of the model was moved from {device} {target}, which is much slower. Close other programs, or "
            "unload the model and place fewer layers on {device}.",
            size=format_bytes(grown_bytes),
            device=sample.device,
            target=where,
        )

    def _paging(self, sample: Sample) -> str | None:
        oldest = self._window[0]
        seconds = sample.time_s - oldest.time_s
        if sample.major_faults is None or oldest.major_faults is None or seconds <= 0:
            return None
        short_bytes = min(PAGING_FREE_BYTES, int((sample.total_bytes or 0) * PAGING_FREE_SHARE))
        if (sample.major_faults - oldest.major_faults) / seconds < PAGING_PER_S or _free_bytes(sample) > short_bytes:
            return None
        return tr(
            "Weights are read from the disk again and again: only {free} of memory is free. Close "
            "other programs, or choose a smaller model or quantisation.",
            free=format_bytes(_free_bytes(sample)),
        )

    def _who(self, sample: Sample) -> str:
        """Return a sentence on the memory that other programs took since the load; empty if it is unknown or small."""
        first = self._first
        if first is None or sample.own_bytes is None or first.own_bytes is None:
            return ""
        # What others use is the whole without our part; compared is now with the moment after the load.
        others_bytes = (_used_bytes(sample) - sample.own_bytes) - (_used_bytes(first) - first.own_bytes)
        if others_bytes < FALL_BYTES:
            return ""
        return tr(
            "Other programs took {others} of memory since the model was loaded. ", others=format_bytes(others_bytes)
        )


def warning_bytes(device: Device, total_bytes: int | None = None) -> int:
    """Return the free memory in bytes below which a device counts as low on memory.

    It is half of the device's margin, but at least the smaller of `FLOOR_BYTES` and the share `FLOOR_SHARE` of its
    total memory.

    `total_bytes`: the device's memory at the last reading; None: unknown.
    """
    floor_bytes = min(FLOOR_BYTES, int((total_bytes or device.total_bytes) * FLOOR_SHARE))
    return max(device.margin_bytes // 2, floor_bytes)


def _used_bytes(sample: Sample) -> int:
    return sample.used_bytes or 0


def _free_bytes(sample: Sample) -> int:
    return max(0, (sample.total_bytes or 0) - _used_bytes(sample))


def _recovering(sample: Sample) -> str:
    return tr(
        "{device} has enough memory again: {free} free.", device=sample.device, free=format_bytes(_free_bytes(sample))
    )
