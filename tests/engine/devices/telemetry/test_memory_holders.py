"""Processes that hold a device's memory: NVML's lists through the real bindings, and this machine's processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import Device, make_host
from engine.devices.telemetry.memory_holders import MAX_HOLDERS, memory_holders
from tests.support.nvml_stub import build_nvml_stub, run_with_nvml

CARD = Device("CUDA0", "first", "CUDA", "gpu", 24 * GIB, pci_bus_id="0000:01:00.0")
ASK = """
import json, msgspec, os, subprocess
from engine.devices.device import Device
from engine.devices.telemetry.memory_holders import memory_holders
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
os.environ["NVML_STUB_PID"] = str(child.pid)
card = Device("CUDA0", "first", "CUDA", "gpu", 24 << 30, pci_bus_id="{pci}")
print(json.dumps([child.pid, *(msgspec.to_builtins(each) for each in memory_holders(card))]))
child.communicate()
"""
nvml_only = pytest.mark.skipif(sys.platform != "linux", reason="the stand-in takes the place of libnvidia-ml.so.1")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_nvml_stub(tmp_path_factory.mktemp("nvml"))


def ask(library: Path, pci: str = "0000:01:00.0", mode: str = "") -> tuple[int, list[dict[str, Any]]]:
    pid, *holders = json.loads(run_with_nvml(library, ASK.replace("{pci}", pci), mode=mode))
    return pid, holders


@nvml_only
def test_processes_of_a_card_are_named_once_and_the_largest_first(library: Path) -> None:
    pid, holders = ask(library)
    assert [(each["pid"], each["held_bytes"]) for each in holders] == [(pid, 3 * GIB), (1, GIB), (2, None)]
    assert holders[0]["name"] == "cat"
    assert [each["ours"] for each in holders] == [True, False, False]
    assert holders[1]["name"] == psutil.Process(1).name()


@nvml_only
@pytest.mark.parametrize(("pci", "mode"), [("0000:77:00.0", ""), ("0000:01:00.0", "no_driver"), ("nonsense", "")])
def test_a_card_that_the_driver_does_not_know_has_none(library: Path, pci: str, mode: str) -> None:
    assert ask(library, pci, mode)[1] == []


def test_the_largest_processes_of_the_host() -> None:
    program = f"block = bytearray({64 * MIB}); print(len(block), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        # A host so small that the child is large on it.
        holders = memory_holders(make_host("host", 1 * GIB))
        child.kill()
    assert len(holders) <= MAX_HOLDERS
    sizes = [each.held_bytes or 0 for each in holders]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size >= GIB // 64 for size in sizes)
    found = {each.pid: each for each in holders}
    assert child.pid in found or min(sizes) >= 64 * MIB
    assert all(each.ours == (each.pid in (os.getpid(), child.pid)) for each in holders if each.pid == child.pid)


def test_nothing_is_known_of_other_machines_and_other_backends() -> None:
    assert memory_holders(replace(CARD, endpoint="10.0.0.1:50052", pci_bus_id=None)) == ()
    assert memory_holders(replace(CARD, backend="Vulkan", pci_bus_id=None)) == ()
