"""AMD readings from a folder that looks like the kernel's."""

from __future__ import annotations

from pathlib import Path

from engine.devices.device import Device
from engine.telemetry.readings import DeviceReadings

GIB = 1 << 30


def make_card(root: Path, index: int, slot: str, files: dict[str, str]) -> Path:
    card = root / "pci" / slot
    for name, text in files.items():
        path = card / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    link = root / "drm" / f"card{index}" / "device"
    link.parent.mkdir(parents=True)
    link.symlink_to(card, target_is_directory=True)
    return card


MEMORY = {"mem_info_vram_used": f"{3 * GIB}\n", "mem_info_vram_total": f"{16 * GIB}\n"}
SENSORS = {
    "gpu_busy_percent": "41\n",
    "hwmon/hwmon3/temp1_input": "52000\n",
    "hwmon/hwmon3/power1_average": "96000000\n",
}
DEVICE = Device("ROCm0", "RX 7800", "HIP", "gpu", 16 * GIB, pci_bus_id="0000:03:00.0")


def test_the_card_in_the_slot_is_read(tmp_path: Path) -> None:
    make_card(tmp_path, 0, "0000:0b:00.0", {"mem_info_vram_used": "1", "mem_info_vram_total": "2"})
    make_card(tmp_path, 1, "0000:03:00.0", MEMORY | SENSORS)

    (sample,) = DeviceReadings([DEVICE], drm_root=tmp_path / "drm").read()

    assert (sample.used_bytes, sample.total_bytes) == (3 * GIB, 16 * GIB)
    assert (sample.utilization_percent, sample.temperature_c, sample.power_w) == (41.0, 52.0, 96.0)


def test_missing_sensors_are_none(tmp_path: Path) -> None:
    make_card(tmp_path, 0, "0000:03:00.0", MEMORY)

    (sample,) = DeviceReadings([DEVICE], drm_root=tmp_path / "drm").read()

    assert sample.used_bytes == 3 * GIB
    assert (sample.utilization_percent, sample.temperature_c, sample.power_w) == (None, None, None)


def test_a_card_that_goes_away_is_a_gap(tmp_path: Path) -> None:
    card = make_card(tmp_path, 0, "0000:03:00.0", MEMORY)
    readings = DeviceReadings([DEVICE], drm_root=tmp_path / "drm")
    (card / "mem_info_vram_used").unlink()

    (sample,) = readings.read()

    assert sample.used_bytes is None
    assert "gone" in sample.note
