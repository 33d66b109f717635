"""NVIDIA readings through the real bindings and a library with NVML's ABI."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.nvml_stub import build_nvml_stub, run_with_nvml

GIB = 1 << 30
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the stand-in takes the place of libnvidia-ml.so.1")

READ = """
import dataclasses, json, os, subprocess, sys
from engine.devices.device import Device
from engine.telemetry.readings import DeviceReadings
devices = [
    Device("CUDA1", "second", "CUDA", "gpu", 12 << 30, pci_bus_id="1A2B:C1:00.0"),
    Device("CUDA0", "first", "CUDA", "gpu", 24 << 30, pci_bus_id="0000:01:00.0"),
    Device("CUDA2", "not there", "CUDA", "gpu", 1 << 30, pci_bus_id="0000:77:00.0"),
]
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
os.environ["NVML_STUB_PID"] = str(child.pid)
readings = DeviceReadings(devices)
print(json.dumps([dataclasses.asdict(sample) for sample in readings.read()]))
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


def read(library: Path | None, mode: str = "") -> dict[str, dict[str, Any]]:
    samples = json.loads(run_with_nvml(library, READ, mode=mode))
    return {sample["device"]: sample for sample in samples}


def test_cards_are_matched_by_pci_id_and_not_by_position(library: Path) -> None:
    samples = read(library)

    assert list(samples) == ["CUDA1", "CUDA0", "CUDA2"]
    first, second, missing = samples["CUDA0"], samples["CUDA1"], samples["CUDA2"]
    assert (first["used_bytes"], first["total_bytes"]) == (5 * GIB, 24 * GIB)
    assert (first["utilization_percent"], first["temperature_c"], first["power_w"]) == (87.0, 64.0, 285.5)
    assert (second["used_bytes"], second["total_bytes"], second["utilization_percent"]) == (GIB, 12 * GIB, 0.0)
    assert missing["used_bytes"] is None
    assert "unknown to the NVIDIA driver" in missing["note"]


def test_own_bytes_are_those_of_our_children(library: Path) -> None:
    samples = read(library)

    assert samples["CUDA0"]["own_bytes"] == 3 * GIB
    assert samples["CUDA1"]["own_bytes"] == 0


def test_a_lost_card_is_a_gap_and_the_other_goes_on(library: Path) -> None:
    samples = read(library, "lost")

    assert samples["CUDA1"]["used_bytes"] is None
    assert "lost" in samples["CUDA1"]["note"].lower()
    assert samples["CUDA0"]["used_bytes"] == 5 * GIB


def test_sensors_that_are_not_supported_are_none(library: Path) -> None:
    first = read(library, "bare")["CUDA0"]

    assert first["used_bytes"] == 5 * GIB
    assert (first["utilization_percent"], first["temperature_c"], first["power_w"]) == (None, None, None)


def test_without_a_driver_every_card_is_a_gap(library: Path) -> None:
    samples = read(library, "no_driver")

    assert [sample["used_bytes"] for sample in samples.values()] == [None, None, None]
    assert "Driver" in samples["CUDA0"]["note"]


def test_without_the_library_every_card_is_a_gap(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")

    samples = read(tmp_path / "libnvidia-ml.so.1")

    assert [sample["used_bytes"] for sample in samples.values()] == [None, None, None]
    assert "Not Found" in samples["CUDA0"]["note"]


def test_closing_lets_go_of_the_library(library: Path) -> None:
    assert run_with_nvml(library, READ + CLOSED).splitlines()[-1] == "0"
