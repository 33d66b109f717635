"""Finds the processes that hold a device's memory, from the NVIDIA driver and from the host's process table."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from types import ModuleType
from typing import Any

import psutil

from engine.base.language import tr
from engine.base.pci import parse_pci_id
from engine.devices.device import Device
from engine.devices.telemetry.cards import Nvml, ask
from engine.devices.telemetry.processes import descendants, resident_bytes
from engine.devices.telemetry.sample import MemoryHolder

MAX_HOLDERS = 5
MIN_SHARE = 64
"""Divisor of the host's memory: processes that hold less than 1/64 of it are left out."""


def memory_holders(device: Device) -> tuple[MemoryHolder, ...]:
    """Return the processes that hold most of a device's memory, largest first; empty if they are unknown.

    They are known for NVIDIA cards and the host only. For an RPC device they are unknown.
    """
    if device.is_rpc:
        return ()
    if device.is_host:
        return _largest(_host_processes(device.total_bytes // MIN_SHARE))
    return _largest(_card_processes(device))


def _largest(holders: Iterable[MemoryHolder]) -> tuple[MemoryHolder, ...]:
    """Return the `MAX_HOLDERS` largest processes; processes of unknown size come last."""
    return tuple(sorted(holders, key=lambda holder: (-(holder.held_bytes or 0), holder.pid))[:MAX_HOLDERS])


def _card_processes(device: Device) -> Iterable[MemoryHolder]:
    pci = parse_pci_id(device.pci_bus_id) if device.pci_bus_id is not None else None
    if pci is None:
        return
    nvml = Nvml()
    try:
        handle = nvml.handle(pci)
        library = nvml.library
        sizes = {} if handle is None or library is None else _sizes(library, handle)
    finally:
        nvml.close()
    own = {os.getpid(), *descendants(os.getpid())}
    for pid, held_bytes in sizes.items():
        yield MemoryHolder(pid=pid, name=_name(pid), held_bytes=held_bytes, ours=pid in own)


def _sizes(library: ModuleType, handle: Any) -> dict[int, int | None]:
    """Return the bytes of a card that each process holds, by process id; None: unknown.

    `library`: NVML. `handle`: NVML's handle of the card.

    The driver lists a process twice if it both computes and draws. Here such a process counts once.
    """
    sizes: dict[int, int | None] = {}
    for function in (library.nvmlDeviceGetComputeRunningProcesses, library.nvmlDeviceGetGraphicsRunningProcesses):
        for process in ask(library, function, handle) or ():
            used = process.usedGpuMemory
            sizes[process.pid] = max(used or 0, sizes.get(process.pid) or 0) or None
    return sizes


def _host_processes(least_bytes: int) -> Iterable[MemoryHolder]:
    own = {os.getpid(), *descendants(os.getpid())}
    for process in psutil.process_iter():
        held_bytes = resident_bytes(process.pid)
        if held_bytes is not None and held_bytes >= least_bytes:
            name = _name(process.pid)
            yield MemoryHolder(pid=process.pid, name=name, held_bytes=held_bytes, ours=process.pid in own)


def _name(pid: int) -> str:
    """Return the name of a process's program.

    If the name cannot be read (another user's process), return a text with the process id.
    """
    with suppress(psutil.Error, OSError):
        return str(psutil.Process(pid).name())
    return tr("process {pid}", pid=pid)
