"""Reads devices while a benchmark runs: memory, clocks, temperature, power, and the load of other programs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Protocol

import psutil
from msgspec import Struct, field

from engine.devices.device import Device, Rig
from engine.devices.telemetry.processes import WorkerProcess, descendants
from engine.devices.telemetry.sample import Sample
from engine.devices.telemetry.sampler import DeviceReadings, Sampler
from engine.machines.bench.results import DeviceState

INTERVAL_S = 0.25
"""Seconds between two readings: short, so that there are several readings in a short answer."""
SLEPT_S = 2.0
"""Smallest difference in seconds between wall clock and monotonic clock that counts as sleep of the machine.

Time services correct the clock by less.
"""


class Window(Struct, frozen=True):
    """Readings of the devices during a span of time, such as one answer or one load.

    `samples`: the readings.
    `seconds`: length of the span.
    `slept_s`: seconds that this computer slept, 0 if it did not.
    `other_load`: share of the processors, 0 to 1, that other programs used; None if unknown.
    """

    samples: tuple[Sample, ...] = ()
    seconds: float = 0.0
    slept_s: float = 0.0
    other_load: float | None = None


class Watch(Protocol):
    """Interface of an object that collects readings of devices between a call of `begin` and a call of `end`.

    Both are called in the same thread.
    """

    def begin(self) -> None: ...

    def end(self) -> Window: ...


class _Begun(Struct):
    clock_s: float
    monotonic_s: float
    busy_s: float
    own_s: float
    samples: list[Sample] = field(default_factory=list)


class Clocks(Protocol):
    """The wall clock and the monotonic clock of a computer, in seconds.

    `wall` continues during sleep; `monotonic` stops (Linux, macOS) or continues (Windows).
    """

    def wall(self) -> float: ...

    def monotonic(self) -> float: ...


class SystemClocks:
    """The wall clock and the monotonic clock of this computer."""

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class DeviceWatch:
    """Reads the state of a rig's devices in a thread of its own; a context manager that starts and stops the thread.

    `workers`: processes of workers that this program started, by endpoint.
    `clocks`: clocks for tests, None for those of this computer.
    """

    def __init__(
        self, rig: Rig, workers: Mapping[str, WorkerProcess] | None = None, clocks: Clocks | None = None
    ) -> None:
        self._clocks = clocks or SystemClocks()
        self._lock = threading.Lock()
        self._begun: _Begun | None = None
        self._sampler = Sampler(DeviceReadings(rig.all_devices, workers), self._take, INTERVAL_S)

    def __enter__(self) -> DeviceWatch:
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sampler.stop()

    def begin(self) -> None:
        """Begin a measurement: `end` returns the readings from now on."""
        busy_s, own_s = processor_seconds()
        with self._lock:
            self._begun = _Begun(self._clocks.wall(), self._clocks.monotonic(), busy_s, own_s)

    def end(self) -> Window:
        """End the measurement that `begin` began, and return its readings."""
        busy_s, own_s = processor_seconds()
        wall_s, monotonic_s = self._clocks.wall(), self._clocks.monotonic()
        with self._lock:
            begun, self._begun = self._begun, None
        if begun is None:
            return Window()
        seconds = monotonic_s - begun.monotonic_s
        # During sleep only the wall clock continues (`Clocks`).
        slept_s = (wall_s - begun.clock_s) - seconds
        others_s = (busy_s - begun.busy_s) - (own_s - begun.own_s)
        return Window(
            tuple(begun.samples),
            seconds,
            slept_s if slept_s > SLEPT_S else 0.0,
            load_share(others_s, seconds, os.cpu_count() or 1),
        )

    def _take(self, samples: tuple[Sample, ...]) -> None:
        with self._lock:
            if self._begun is not None:
                self._begun.samples.extend(samples)


def load_share(busy_s: float, seconds: float, n_processors: int) -> float | None:
    """Return the share of the processors' time, 0 to 1, that programs used during a measurement.

    None if the measurement was too short, because the kernel counts processor time in steps.

    `busy_s`: processor seconds that programs used.
    `seconds`: duration of the measurement.
    `n_processors`: number of logical processors.
    """
    # The kernel counts processor time in ticks of 10 ms.
    if seconds < 0.1:
        return None
    return min(1.0, max(0.0, busy_s / (seconds * n_processors)))


def processor_seconds() -> tuple[float, float]:
    """Return the processor seconds of all programs since the system's start, and those of our running processes."""
    times = psutil.cpu_times()
    busy_s = sum(getattr(times, name, 0.0) for name in ("user", "system", "nice", "irq", "softirq", "steal"))
    own_s = 0.0
    for pid in (os.getpid(), *descendants(os.getpid())):
        # A child may end while it is read.
        with suppress(psutil.Error):
            used = psutil.Process(pid).cpu_times()
            own_s += used.user + used.system
    return busy_s, own_s


def peak_bytes(windows: Iterable[Window], device: str) -> int | None:
    """Return the highest memory in bytes that our processes used on a device; None if there is no reading.

    `windows`: readings to search. `device`: id of the device.
    """
    sizes = [
        sample.own_bytes
        for window in windows
        for sample in window.samples
        if sample.device == device and sample.own_bytes is not None
    ]
    return max(sizes) if sizes else None


def device_state(windows: Sequence[tuple[Window, int]], device: Device) -> DeviceState | None:
    """Return the state of a device during answers (clock, temperature, power, throttling); None if nothing was read.

    `windows`: the readings of each answer with the number of its generated tokens.
    """
    samples = [sample for window, _ in windows for sample in window.samples if sample.device == device.id]
    cards = [each.card for each in samples if each.card is not None]
    clocks = [each.core_clock_mhz for each in cards if each.core_clock_mhz is not None]
    heat = _known(samples, lambda each: each.temperature_c)
    power = _known(samples, lambda each: each.power_w)
    reasons = dict.fromkeys(reason for each in cards for reason in each.throttled_by)
    if not (clocks or heat or power or reasons):
        return None
    return DeviceState(
        device=device.id,
        clock_mhz=median(clocks) if clocks else None,
        temperature_c=max(heat) if heat else None,
        power_w=median(power) if power else None,
        joules_per_token=_joules(windows, device.id),
        throttled=", ".join(reasons),
    )


def _joules(windows: Sequence[tuple[Window, int]], device_id: str) -> float | None:
    """Return the energy per generated token of a device in joules; None if there are no readings of power.

    The energy of an answer is its mean power times its duration.

    `windows`: the readings of each answer with the number of its generated tokens.
    """
    joules = tokens = 0.0
    for window, n_tokens in windows:
        power = [each.power_w for each in window.samples if each.device == device_id and each.power_w is not None]
        if power and n_tokens:
            joules += sum(power) / len(power) * window.seconds
            tokens += n_tokens
    return joules / tokens if tokens else None


def _known(samples: Iterable[Sample], read: Callable[[Sample], float | None]) -> list[float]:
    return [value for each in samples if (value := read(each)) is not None]
