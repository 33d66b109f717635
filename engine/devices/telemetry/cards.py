"""Readings of graphics cards through NVML (NVIDIA) and sysfs: memory and sensors, drivers, displays and PCIe links."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec import Struct

from engine.base.control_groups import kernel_text
from engine.base.language import tr
from engine.base.pci import PciId, parse_pci_id
from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import Device, Rig
from engine.devices.telemetry.processes import descendants
from engine.devices.telemetry.sample import CardState, Sample, gap

DRM_ROOT = Path("/sys/class/drm")


def find_amd_card(pci: PciId, drm_root: Path = DRM_ROOT) -> Path | None:
    """Return the sysfs folder of the card with this PCI address; None if no amdgpu card with memory files has it."""
    # `device` is a link to the PCI folder, whose name is the slot.
    for folder in sorted(drm_root.glob("card*/device")):
        card = folder.resolve()
        if parse_pci_id(card.name) == pci and (card / "mem_info_vram_used").is_file():
            return card
    return None


class AmdReader:
    """Reads the memory and sensors of one AMD card from sysfs. Values without a sensor on the card are None."""

    def __init__(self, device: str, folder: Path) -> None:
        self._device = device
        self._folder = folder

    def read(self, time_s: float) -> Sample:
        # Files of amdgpu, in bytes.
        used_bytes = _number(self._folder / "mem_info_vram_used")
        total_bytes = _number(self._folder / "mem_info_vram_total")
        if used_bytes is None or total_bytes is None:
            return gap(self._device, time_s, tr("no reading: the graphics card was removed or has failed"))
        busy_percent = _number(self._folder / "gpu_busy_percent")
        # Units of hwmon: millidegrees Celsius and microwatts.
        millidegrees = self._sensor("temp1_input")
        microwatts = self._sensor("power1_average")
        return Sample(
            self._device,
            time_s,
            used_bytes=used_bytes,
            total_bytes=total_bytes,
            # GTT is host memory that the card can address: amdgpu moves buffers there when VRAM is full.
            spilled_bytes=_number(self._folder / "mem_info_gtt_used"),
            utilization_percent=None if busy_percent is None else float(busy_percent),
            temperature_c=None if millidegrees is None else millidegrees / 1000,
            power_w=None if microwatts is None else microwatts / 1_000_000,
            card=self._state(),
        )

    def _state(self) -> CardState:
        limit_microwatts = self._sensor("power1_cap")
        core, memory = self._sensor("freq1_input"), self._sensor("freq2_input")  # Hz; the second one is the memory's
        lanes = kernel_text(self._folder / "current_link_width")
        return CardState(
            power_limit_w=None if limit_microwatts is None else limit_microwatts / 1_000_000,
            core_clock_mhz=None if core is None else core / 1_000_000,
            memory_clock_mhz=None if memory is None else memory / 1_000_000,
            # The kernel writes "16.0 GT/s PCIe".
            pcie_generation=_GENERATIONS.get(kernel_text(self._folder / "current_link_speed").split(" ")[0]),
            pcie_lanes=int(lanes) if lanes.isdecimal() else None,
        )

    def _sensor(self, name: str) -> int | None:
        for path in sorted(self._folder.glob(f"hwmon/hwmon*/{name}")):
            return _number(path)
        return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


class Nvml:
    """NVIDIA's management library (NVML), opened at the first use. Not thread-safe.

    Without a driver there are no cards, and no method raises an error. `problem` then has NVML's error message.
    """

    def __init__(self) -> None:
        self._library: ModuleType | None = None
        self._handles: dict[PciId, Any] | None = None
        self.problem = ""

    @property
    def library(self) -> ModuleType | None:
        return self._library

    @property
    def slots(self) -> tuple[PciId, ...]:
        """PCI addresses of the cards that NVML lists; empty if it is not open."""
        return tuple(self._handles or ())

    def handle(self, pci: PciId) -> Any | None:
        """Return NVML's handle of the card with this PCI address; None if NVML has no such card.

        Opens NVML if necessary.
        """
        self.open()
        return (self._handles or {}).get(pci)

    def open(self) -> None:
        """Open NVML, if it is not open. After a failure, `library` is None and `problem` has the error message."""
        if self._handles is None:
            self._handles = self._open()

    def close(self) -> None:
        """Close NVML; the next call opens it again."""
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
        # NVML and CUDA number cards in different orders, so cards are found by their slots.
        for index in range(ask(pynvml, pynvml.nvmlDeviceGetCount) or 0):
            handle = ask(pynvml, pynvml.nvmlDeviceGetHandleByIndex, index)
            info = None if handle is None else ask(pynvml, pynvml.nvmlDeviceGetPciInfo, handle)
            if info is not None:
                handles[PciId(info.domain, info.bus, info.device)] = handle
        return handles


def ask(library: ModuleType, function: Callable[..., Any], *arguments: object) -> Any | None:
    """Return the result of a function of NVML; None if the card or the driver does not support it."""
    try:
        return function(*arguments)
    except library.NVMLError:
        return None


class NvmlReader:
    """Reads one NVIDIA card through NVML.

    The sample's `own_bytes` is the memory of our child processes, if the driver reports memory by process.
    """

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
                tr(
                    "no reading: {problem}",
                    problem=self._nvml.problem or tr("the NVIDIA driver does not know the device"),
                ),
            )
        if _is_sliced(library, handle):
            # What CUDA uses is a slice; the memory and the load of the whole card are not those of the device.
            return gap(
                self._device,
                time_s,
                tr(
                    "no reading: the device is a slice of a graphics card (MIG), and "
                    "the driver reports only the whole card"
                ),
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
            card=_nvidia_state(library, handle),
        )


_THROTTLES = {
    "nvmlClocksThrottleReasonSwPowerCap": tr("power limit"),
    "nvmlClocksThrottleReasonHwSlowdown": tr("hardware slowdown"),
    "nvmlClocksThrottleReasonSwThermalSlowdown": tr("temperature"),
    "nvmlClocksThrottleReasonHwThermalSlowdown": tr("temperature (hardware slowdown)"),
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": tr("power brake signal"),
    "nvmlClocksThrottleReasonSyncBoost": tr("clocks synchronised with other graphics cards"),
}
"""Texts for the reasons for which NVML reports lowered clocks.

Two reasons are left out: the card is idle, or the user limits the clocks.
"""


def _nvidia_state(library: ModuleType, handle: Any) -> CardState:
    limit_milliwatts = ask(library, library.nvmlDeviceGetEnforcedPowerLimit, handle)
    core = ask(library, library.nvmlDeviceGetClockInfo, handle, library.NVML_CLOCK_SM)
    memory = ask(library, library.nvmlDeviceGetClockInfo, handle, library.NVML_CLOCK_MEM)
    reasons = ask(library, library.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    return CardState(
        power_limit_w=None if limit_milliwatts is None else limit_milliwatts / 1000,
        core_clock_mhz=None if core is None else float(core),
        memory_clock_mhz=None if memory is None else float(memory),
        pcie_generation=ask(library, library.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        pcie_lanes=ask(library, library.nvmlDeviceGetCurrPcieLinkWidth, handle),
        throttled_by=tuple(words for name, words in _THROTTLES.items() if reasons & getattr(library, name, 0)),
    )


def _own_bytes(library: ModuleType, handle: Any) -> int | None:
    # On WDDM, and without the right to see other processes, the driver gives no sizes: the sum would be too small.
    processes = ask(library, library.nvmlDeviceGetComputeRunningProcesses, handle)
    if processes is None:
        return None
    children = set(descendants(os.getpid()))
    sizes = [process.usedGpuMemory for process in processes if process.pid in children]
    return None if None in sizes else sum(sizes)


def read_drivers(devices: Iterable[Device]) -> dict[str, str]:
    """Return the driver with its version for each local card, by device id. Blocks for a moment.

    RPC devices and the host are left out.
    """
    cards = {device.id: parse_pci_id(device.pci_bus_id or "") for device in devices if not device.is_rpc}
    nvml = Nvml()
    try:
        kernel = f"{platform.system()} {platform.release()}"
        found = {}
        for device_id, pci in cards.items():
            if pci is None:
                continue
            # Drivers of other makers are part of the kernel, so its release stands for their version.
            known = nvml.handle(pci) is not None and nvml.library is not None
            found[device_id] = f"NVIDIA {nvidia_driver(nvml)}" if known else kernel
        return found
    finally:
        nvml.close()


def nvidia_driver(nvml: Nvml) -> str | None:
    """Return the version of NVIDIA's driver, None if it cannot be read."""
    library = nvml.library
    version = None if library is None else ask(library, library.nvmlSystemGetDriverVersion)
    return None if version is None else str(version)


class NvidiaCard(Struct, frozen=True):
    """A card as NVIDIA's driver lists it.

    `total_bytes`, `free_bytes`: the card's memory; 0 and None for a card that shares the host's memory, because the
    driver does not report that memory.
    `is_sliced`: whether CUDA sees slices of the card (MIG) instead of the card.
    """

    slot: PciId
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int | None
    is_sliced: bool = False


def list_nvidia_cards() -> tuple[NvidiaCard, ...]:
    """Return the NVIDIA cards, sorted by PCI address; empty if there is no driver.

    Blocks for a moment, and creates no CUDA context.
    """
    nvml = Nvml()
    try:
        nvml.open()
        found = (_nvidia_card(nvml, slot) for slot in sorted(nvml.slots))
        return tuple(card for card in found if card is not None)
    finally:
        nvml.close()


def _nvidia_card(nvml: Nvml, slot: PciId) -> NvidiaCard | None:
    handle, library = nvml.handle(slot), nvml.library
    uuid = None if handle is None or library is None else ask(library, library.nvmlDeviceGetUUID, handle)
    if library is None or uuid is None:
        return None
    name = ask(library, library.nvmlDeviceGetName, handle)
    memory = ask(library, library.nvmlDeviceGetMemoryInfo, handle)
    total_bytes, free_bytes = (0, None) if memory is None else (int(memory.total), int(memory.free))
    return NvidiaCard(slot, str(uuid), str(name or "NVIDIA"), total_bytes, free_bytes, _is_sliced(library, handle))


def _is_sliced(library: ModuleType, handle: Any) -> bool:
    """Return whether CUDA sees slices of a card (MIG) instead of the card."""
    modes = ask(library, library.nvmlDeviceGetMigMode, handle)
    return modes is not None and bool(modes[0] == library.NVML_DEVICE_MIG_ENABLE)


DISPLAY_MARGIN_BYTES = GIB
"""Default margin in bytes of a card that draws a desktop, because each new window takes memory of the card."""
# PCIe by generation, per lane and direction, after 8b/10b (1, 2) or 128b/130b encoding (from 3 on).
_LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9}
_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
"""PCIe generation by transfer rate in GT/s, as the kernel writes it ("16.0 GT/s PCIe")."""
_REACHED = 0.8
"""Share of a PCIe link's raw speed that copies reach."""


class CardFacts(Struct, frozen=True):
    """Properties of a card that do not change while the program runs.

    `drives_display`: whether a screen is connected and active.
    `link_bytes_per_second`: speed of copies between host and card; None: unknown.
    """

    drives_display: bool = False
    link_bytes_per_second: float | None = None


def read_card_facts(devices: Iterable[Device], *, drm_root: Path = DRM_ROOT) -> dict[str, CardFacts]:
    """Return display and PCIe link of the local cards in `devices`, by device id. May block for a moment."""
    slots = {
        device.id: pci
        for device in devices
        if not device.is_rpc and (pci := parse_pci_id(device.pci_bus_id or "")) is not None
    }
    nvml = Nvml()
    try:
        return {device_id: _nvidia(nvml, pci) or _kernel(pci, drm_root) for device_id, pci in slots.items()}
    finally:
        nvml.close()


def with_display_margins(rig: Rig, facts: Mapping[str, CardFacts]) -> Rig:
    """Return `rig` with a margin of at least `DISPLAY_MARGIN_BYTES` on each card that drives a display.

    `facts`: properties of cards by device id.
    """

    def with_margin(device: Device) -> Device:
        known = facts.get(device.id)
        if known is None or not known.drives_display:
            return device
        return replace(device, margin_bytes=max(device.margin_bytes, DISPLAY_MARGIN_BYTES))

    return Rig(tuple(map(with_margin, rig.devices)), rig.host)


def link_speed(generation: int, lanes: int) -> float | None:
    """Return the bytes per second that copies reach over a PCIe link; None if generation or lanes are unknown."""
    lane = _LANE_BYTES_PER_SECOND.get(generation)
    return None if lane is None or lanes < 1 else lane * lanes * _REACHED


def _nvidia(nvml: Nvml, pci: PciId) -> CardFacts | None:
    handle = nvml.handle(pci)
    library = nvml.library
    if handle is None or library is None:
        return None
    # The generation falls while a card idles, the width does not: a narrow slot shows in the current one.
    generation = ask(library, library.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    lanes = ask(library, library.nvmlDeviceGetCurrPcieLinkWidth, handle)
    speed = None if generation is None or lanes is None else link_speed(int(generation), int(lanes))
    return CardFacts(bool(ask(library, library.nvmlDeviceGetDisplayActive, handle)), speed)


def _kernel(pci: PciId, drm_root: Path) -> CardFacts:
    """Return display and PCIe link of a card from sysfs; default values if sysfs does not list the card.

    The kernel reports them for cards of all makers.
    """
    for link in sorted(drm_root.glob("card*/device")):
        if parse_pci_id(link.resolve().name) == pci:
            # Connectors are folders beside the card's, such as card0-HDMI-A-1.
            outputs = sorted(drm_root.glob(f"{link.parent.name}-*/enabled"))
            return CardFacts(any(kernel_text(output) == "enabled" for output in outputs), _kernel_link(link))
    return CardFacts()


def _kernel_link(card: Path) -> float | None:
    # The maximum speed, because an idle card lowers the present one; the present width, because a slot may limit it.
    transfers, lanes = kernel_text(card / "max_link_speed").split(" "), kernel_text(card / "current_link_width")
    generation = _GENERATIONS.get(transfers[0])
    return None if generation is None or not lanes.isdecimal() else link_speed(generation, int(lanes))
