"""Live readings of AMD cards from the kernel's files."""

from __future__ import annotations

from pathlib import Path

from engine.language import tr
from engine.pci import PciId, parse_pci_id
from engine.telemetry.reader import gap
from engine.telemetry.sample import Sample

DRM_ROOT = Path("/sys/class/drm")


def find_amd_card(pci: PciId, drm_root: Path = DRM_ROOT) -> Path | None:
    """Return the folder of the card in this slot if its driver tells memory, else None."""
    for folder in sorted(drm_root.glob("card*/device")):
        card = folder.resolve()
        if parse_pci_id(card.name) == pci and (card / "mem_info_vram_used").is_file():
            return card
    return None


class AmdReader:
    """Reads one card; sensors that a card lacks are None."""

    def __init__(self, device: str, folder: Path) -> None:
        self._device = device
        self._folder = folder

    def read(self, time_s: float) -> Sample:
        used_bytes = _number(self._folder / "mem_info_vram_used")
        total_bytes = _number(self._folder / "mem_info_vram_total")
        if used_bytes is None or total_bytes is None:
            return gap(self._device, time_s, tr("no reading: the card is gone"))
        busy_percent = _number(self._folder / "gpu_busy_percent")
        millidegrees = self._sensor("temp1_input")
        microwatts = self._sensor("power1_average")
        return Sample(
            self._device,
            time_s,
            used_bytes=used_bytes,
            total_bytes=total_bytes,
            spilled_bytes=_number(self._folder / "mem_info_gtt_used"),
            utilization_percent=None if busy_percent is None else float(busy_percent),
            temperature_c=None if millidegrees is None else millidegrees / 1000,
            power_w=None if microwatts is None else microwatts / 1_000_000,
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
