"""Screens and links of cards, from NVML's ABI and from a folder that looks like the kernel's."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.devices.device import Device, Rig, make_host
from engine.telemetry.cards import CardFacts, link_speed, read_card_facts, with_display_margins
from engine.units import GIB, MIB
from tests.support.nvml_stub import build_nvml_stub, run_with_nvml

CARD = Device("ROCm0", "RX 7800", "HIP", "gpu", 16 * GIB, pci_bus_id="0000:03:00.0", margin_bytes=512 * MIB)
READ = """
import dataclasses, json
from engine.devices.device import Device
from engine.telemetry.cards import read_card_facts
devices = [
    Device("CUDA0", "first", "CUDA", "gpu", 24 << 30, pci_bus_id="0000:01:00.0"),
    Device("CUDA1", "second", "CUDA", "gpu", 12 << 30, pci_bus_id="1A2B:C1:00.0"),
    Device("RPC0", "elsewhere", "RPC", "gpu", 12 << 30, pci_bus_id="0000:01:00.0", endpoint="10.0.0.1:50052"),
]
print(json.dumps({key: dataclasses.asdict(facts) for key, facts in read_card_facts(devices).items()}))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_nvml_stub(tmp_path_factory.mktemp("nvml"))


def read(library: Path | None, mode: str = "") -> dict[str, dict[str, Any]]:
    facts: dict[str, dict[str, Any]] = json.loads(run_with_nvml(library, READ, mode=mode))
    return facts


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in takes the place of libnvidia-ml.so.1")
def test_nvml_tells_screens_and_lanes(library: Path) -> None:
    facts = read(library)
    assert {key: each["drives_display"] for key, each in facts.items()} == {"CUDA0": True, "CUDA1": False}
    assert facts["CUDA0"]["link_bytes_per_second"] == link_speed(4, 16)
    assert facts["CUDA1"]["link_bytes_per_second"] == link_speed(3, 4)


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in takes the place of libnvidia-ml.so.1")
@pytest.mark.parametrize("mode", ["bare", "no_driver"])
def test_a_driver_that_tells_nothing_is_no_fault(mode: str, library: Path) -> None:
    nothing = {"drives_display": False, "link_bytes_per_second": None}
    assert read(library, mode) == {"CUDA0": nothing, "CUDA1": nothing}


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
