"""Live readings of the host's memory and processor."""

from __future__ import annotations

import os
from collections.abc import Callable

import psutil

from engine.devices.host_memory import HostMemory, read_host_memory
from engine.telemetry.process_memory import descendants, major_faults, resident_bytes, swapped_bytes, total_of
from engine.telemetry.sample import Sample


class HostReader:
    """`own_bytes` counts all children of this process: those of loaded models, lab workers, probes."""

    def __init__(self, device: str, read_memory: Callable[[], HostMemory] = read_host_memory) -> None:
        self._device = device
        self._read_memory = read_memory
        self._primed = False

    def read(self, time_s: float) -> Sample:
        memory = self._read_memory()
        children = descendants(os.getpid())
        return Sample(
            self._device,
            time_s,
            used_bytes=memory.used_bytes,
            total_bytes=memory.total_bytes,
            own_bytes=total_of(children, resident_bytes) or 0,
            spilled_bytes=total_of(children, swapped_bytes),
            major_faults=total_of(children, major_faults),
            utilization_percent=self._utilization(),
        )

    def _utilization(self) -> float | None:
        percent = float(psutil.cpu_percent(interval=None))
        # The first call has nothing to compare with and answers 0.
        first, self._primed = not self._primed, True
        return None if first else percent
