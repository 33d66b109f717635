"""Live readings of NVIDIA cards through NVML, matched to our devices by PCI id."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from engine.language import tr
from engine.pci import PciId
from engine.telemetry.process_memory import descendants
from engine.telemetry.reader import gap
from engine.telemetry.sample import Sample


class Nvml:
    """The library, opened at the first question, used by one thread. Without a driver there are no cards, no error."""

    def __init__(self) -> None:
        self._library: ModuleType | None = None
        self._handles: dict[PciId, Any] | None = None
        self.problem = ""

    @property
    def library(self) -> ModuleType | None:
        return self._library

    def handle(self, pci: PciId) -> Any | None:
        """Return NVML's handle of the card in this slot, None if it knows none."""
        self.open()
        return (self._handles or {}).get(pci)

    def open(self) -> None:
        """Open the library where it is not open yet; `library` and `problem` tell what came of it."""
        if self._handles is None:
            self._handles = self._open()

    def close(self) -> None:
        """Let go of the library; the next question opens it again."""
        library, self._library, self._handles = self._library, None, None
        if library is not None:
            ask(library, library.nvmlShutdown)

    def _open(self) -> dict[PciId, Any]:
        # Not at the top: it takes as long as the rest of the telemetry, for machines that mostly have no such card.
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.problem = str(error)
            return {}
        self._library = pynvml
        handles: dict[PciId, Any] = {}
        for index in range(ask(pynvml, pynvml.nvmlDeviceGetCount) or 0):
            handle = ask(pynvml, pynvml.nvmlDeviceGetHandleByIndex, index)
            info = None if handle is None else ask(pynvml, pynvml.nvmlDeviceGetPciInfo, handle)
            if info is not None:
                handles[PciId(info.domain, info.bus, info.device)] = handle
        return handles


def ask(library: ModuleType, function: Callable[..., Any], *arguments: object) -> Any | None:
    """Return what NVML answers, None when the card or the driver cannot tell."""
    try:
        return function(*arguments)
    except library.NVMLError:
        return None


class NvmlReader:
    """Reads one card. `own_bytes` counts our children, where the driver tells memory by process."""

    def __init__(self, device: str, pci: PciId, nvml: Nvml) -> None:
        self._device = device
        self._pci = pci
        self._nvml = nvml

    def read(self, time_s: float) -> Sample:
        handle = self._nvml.handle(self._pci)
        library = self._nvml.library
        if handle is None or library is None:
            return gap(
                self._device,
                time_s,
                tr("no reading: {problem}", problem=self._nvml.problem or tr("unknown to the NVIDIA driver")),
            )
        try:
            memory = library.nvmlDeviceGetMemoryInfo(handle)
        except library.NVMLError as error:
            return gap(self._device, time_s, tr("no reading: {error}", error=error))
        rates = ask(library, library.nvmlDeviceGetUtilizationRates, handle)
        temperature = ask(library, library.nvmlDeviceGetTemperature, handle, library.NVML_TEMPERATURE_GPU)
        milliwatts = ask(library, library.nvmlDeviceGetPowerUsage, handle)
        return Sample(
            self._device,
            time_s,
            used_bytes=int(memory.used),
            total_bytes=int(memory.total),
            own_bytes=_own_bytes(library, handle),
            utilization_percent=None if rates is None else float(rates.gpu),
            temperature_c=None if temperature is None else float(temperature),
            power_w=None if milliwatts is None else milliwatts / 1000,
        )


def _own_bytes(library: ModuleType, handle: Any) -> int | None:
    processes = ask(library, library.nvmlDeviceGetComputeRunningProcesses, handle)
    if processes is None:
        return None
    children = set(descendants(os.getpid()))
    sizes = [process.usedGpuMemory for process in processes if process.pid in children]
    return None if None in sizes else sum(sizes)
