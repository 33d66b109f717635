"""Readings of cards by NVML and the kernel's files; drivers, displays and PCIe links."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import Device, Rig, make_host
from engine.devices.telemetry.cards import CardFacts, link_speed, read_card_facts, with_display_margins
from engine.devices.telemetry.sample import CardState
from engine.devices.telemetry.sampler import DeviceReadings
from tests.support.nvml_stub import build_nvml_stub, run_with_nvml


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


def test_clocks_limit_and_link_of_an_amd_card(tmp_path: Path) -> None:
    further = {
        "hwmon/hwmon3/power1_cap": "212000000\n",
        "hwmon/hwmon3/freq1_input": "2124000000\n",
        "hwmon/hwmon3/freq2_input": "1218000000\n",
        "current_link_speed": "16.0 GT/s PCIe\n",
        "current_link_width": "16\n",
    }
    make_card(tmp_path, 1, "0000:03:00.0", MEMORY | SENSORS | further)

    (sample,) = DeviceReadings([DEVICE], drm_root=tmp_path / "drm").read()

    assert sample.card == CardState(212.0, 2124.0, 1218.0, 4, 16)


def test_missing_sensors_are_none(tmp_path: Path) -> None:
    make_card(tmp_path, 0, "0000:03:00.0", MEMORY)

    (sample,) = DeviceReadings([DEVICE], drm_root=tmp_path / "drm").read()

    assert sample.used_bytes == 3 * GIB
    assert (sample.utilization_percent, sample.temperature_c, sample.power_w) == (None, None, None)
    assert sample.card == CardState()


def test_a_card_that_goes_away_is_a_gap(tmp_path: Path) -> None:
    card = make_card(tmp_path, 0, "0000:03:00.0", MEMORY)
    readings = DeviceReadings([DEVICE], drm_root=tmp_path / "drm")
    (card / "mem_info_vram_used").unlink()

    (sample,) = readings.read()

    assert sample.used_bytes is None
    assert "was removed" in sample.note


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the stand-in takes the place of libnvidia-ml.so.1")

READ_SAMPLES = """
import json, os, subprocess, sys
from msgspec import to_builtins
from engine.devices.device import Device
from engine.devices.telemetry.sampler import DeviceReadings
devices = [
    Device("CUDA1", "second", "CUDA", "gpu", 12 << 30, pci_bus_id="1A2B:C1:00.0"),
    Device("CUDA0", "first", "CUDA", "gpu", 24 << 30, pci_bus_id="0000:01:00.0"),
    Device("CUDA2", "not there", "CUDA", "gpu", 1 << 30, pci_bus_id="0000:77:00.0"),
]
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
os.environ["NVML_STUB_PID"] = str(child.pid)
readings = DeviceReadings(devices)
print(json.dumps([to_builtins(sample) for sample in readings.read()]))
readings.close()
child.communicate()
"""
CLOSED = """
import ctypes
print(ctypes.CDLL("libnvidia-ml.so.1").stubOpenCount())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_nvml_stub(tmp_path_factory.mktemp("nvml"))


def read_samples(library: Path | None, mode: str = "") -> dict[str, dict[str, Any]]:
    samples = json.loads(run_with_nvml(library, READ_SAMPLES, mode=mode))
    return {sample["device"]: sample for sample in samples}


def test_cards_are_matched_by_pci_id_and_not_by_position(library: Path) -> None:
    samples = read_samples(library)

    assert list(samples) == ["CUDA1", "CUDA0", "CUDA2"]
    first, second, missing = samples["CUDA0"], samples["CUDA1"], samples["CUDA2"]
    assert (first["used_bytes"], first["total_bytes"]) == (5 * GIB, 24 * GIB)
    assert (first["utilization_percent"], first["temperature_c"], first["power_w"]) == (87.0, 64.0, 285.5)
    assert (second["used_bytes"], second["total_bytes"], second["utilization_percent"]) == (GIB, 12 * GIB, 0.0)
    assert missing["used_bytes"] is None
    assert "the NVIDIA driver does not know the device" in missing["note"]


def test_clocks_limit_link_and_throttling_are_read(library: Path) -> None:
    samples = read_samples(library)

    assert samples["CUDA0"]["card"] == {
        "power_limit_w": 350.0,
        "core_clock_mhz": 1695.0,
        "memory_clock_mhz": 9751.0,
        "pcie_generation": 1,
        "pcie_lanes": 16,
        "throttled_by": ["power limit", "temperature"],
    }
    assert samples["CUDA1"]["card"]["throttled_by"] == []
    bare = dict.fromkeys(samples["CUDA0"]["card"]) | {"throttled_by": []}
    assert read_samples(library, "bare")["CUDA0"]["card"] == bare


def test_own_bytes_are_those_of_our_children(library: Path) -> None:
    samples = read_samples(library)

    assert samples["CUDA0"]["own_bytes"] == 3 * GIB
    assert samples["CUDA1"]["own_bytes"] == 0


def test_a_lost_card_is_a_gap_and_the_other_goes_on(library: Path) -> None:
    samples = read_samples(library, "lost")

    assert samples["CUDA1"]["used_bytes"] is None
    assert "lost" in samples["CUDA1"]["note"].lower()
    assert samples["CUDA0"]["used_bytes"] == 5 * GIB


def test_sensors_that_are_not_supported_are_none(library: Path) -> None:
    first = read_samples(library, "bare")["CUDA0"]

    assert first["used_bytes"] == 5 * GIB
    assert (first["utilization_percent"], first["temperature_c"], first["power_w"]) == (None, None, None)


def test_without_a_driver_every_card_is_a_gap(library: Path) -> None:
    samples = read_samples(library, "no_driver")

    assert [sample["used_bytes"] for sample in samples.values()] == [None, None, None]
    assert "Driver" in samples["CUDA0"]["note"]


def test_without_the_library_every_card_is_a_gap(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")

    samples = read_samples(tmp_path / "libnvidia-ml.so.1")

    assert [sample["used_bytes"] for sample in samples.values()] == [None, None, None]
    assert "Not Found" in samples["CUDA0"]["note"]


def test_closing_lets_go_of_the_library(library: Path) -> None:
    assert run_with_nvml(library, READ_SAMPLES + CLOSED).splitlines()[-1] == "0"


CARD = Device("ROCm0", "RX 7800", "HIP", "gpu", 16 * GIB, pci_bus_id="0000:03:00.0", margin_bytes=512 * MIB)
READ_FACTS = """
import json
from msgspec import to_builtins
from engine.devices.device import Device
from engine.devices.telemetry.cards import read_card_facts
devices = [
    Device("CUDA0", "first", "CUDA", "gpu", 24 << 30, pci_bus_id="0000:01:00.0"),
    Device("CUDA1", "second", "CUDA", "gpu", 12 << 30, pci_bus_id="1A2B:C1:00.0"),
    Device("RPC0", "elsewhere", "RPC", "gpu", 12 << 30, pci_bus_id="0000:01:00.0", endpoint="10.0.0.1:50052"),
]
print(json.dumps({key: to_builtins(facts) for key, facts in read_card_facts(devices).items()}))
"""


def read_facts(library: Path | None, mode: str = "") -> dict[str, dict[str, Any]]:
    facts: dict[str, dict[str, Any]] = json.loads(run_with_nvml(library, READ_FACTS, mode=mode))
    return facts


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in takes the place of libnvidia-ml.so.1")
def test_nvml_tells_screens_and_lanes(library: Path) -> None:
    facts = read_facts(library)
    assert {key: each["drives_display"] for key, each in facts.items()} == {"CUDA0": True, "CUDA1": False}
    assert facts["CUDA0"]["link_bytes_per_second"] == link_speed(4, 16)
    assert facts["CUDA1"]["link_bytes_per_second"] == link_speed(3, 4)


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in takes the place of libnvidia-ml.so.1")
@pytest.mark.parametrize("mode", ["bare", "no_driver"])
def test_a_driver_that_tells_nothing_is_no_fault(mode: str, library: Path) -> None:
    nothing = {"drives_display": False, "link_bytes_per_second": None}
    assert read_facts(library, mode) == {"CUDA0": nothing, "CUDA1": nothing}


def make_kernel_card(root: Path, connectors: dict[str, str]) -> Path:
    card = root / "pci" / "0000:03:00.0"
    card.mkdir(parents=True)
    (card / "max_link_speed").write_text("16.0 GT/s PCIe\n")
    (card / "current_link_width").write_text("8\n")
    drm = root / "drm"
    (drm / "card1").mkdir(parents=True)
    (drm / "card1" / "device").symlink_to(card, target_is_directory=True)
    for name, state in connectors.items():
        (drm / f"card1-{name}").mkdir()
        (drm / f"card1-{name}" / "enabled").write_text(f"{state}\n")
    return drm


@pytest.mark.parametrize(
    ("connectors", "active"),
    [({"DP-1": "disabled", "HDMI-A-1": "enabled"}, True), ({"DP-1": "disabled"}, False), ({}, False)],
)
def test_the_kernel_tells_it_of_other_cards(connectors: dict[str, str], active: bool, tmp_path: Path) -> None:
    drm = make_kernel_card(tmp_path, connectors)
    elsewhere = replace(CARD, id="ROCm1", pci_bus_id="0000:04:00.0")
    facts = read_card_facts([CARD, elsewhere, replace(CARD, id="Vulkan0", pci_bus_id=None)], drm_root=drm)
    assert facts == {"ROCm0": CardFacts(active, link_speed(4, 8)), "ROCm1": CardFacts()}


def test_a_card_with_a_screen_keeps_more_free() -> None:
    large = replace(CARD, id="ROCm1", margin_bytes=2 * GIB)
    rig = Rig((CARD, large, replace(CARD, id="ROCm2")), make_host("host", GIB))
    facts = {"ROCm0": CardFacts(True), "ROCm1": CardFacts(True), "ROCm2": CardFacts(False)}
    margins = [device.margin_bytes for device in with_display_margins(rig, facts).devices]
    assert margins == [GIB, 2 * GIB, 512 * MIB]


def test_links() -> None:
    assert link_speed(3, 16) == pytest.approx(12.6e9, rel=0.01)
    assert link_speed(9, 16) is None
    assert link_speed(4, 0) is None
