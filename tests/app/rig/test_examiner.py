"""Help > Check This Computer while a rig file is open: this machine is checked, and the file stays open."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.background import Background
from app.notices import Notices
from app.rig.examiner import Examiner
from app.wiring import RigObjects
from engine.base.units import GIB
from engine.devices.device import Device, Rig, make_host
from engine.devices.host_memory import read_host_memory
from engine.devices.rig_file import write_rig
from engine.machines.doctor.machine import MachineSteps
from engine.machines.doctor.report import Report, Step

CARD = Device("CUDA0", "card", "CUDA", "gpu", 24 * GIB, 24 * GIB, pci_bus_id="0000:01:00.0")
LARGE_HOST = make_host("imaginary", 1 << 50)


def test_a_check_leaves_the_rig_file_open_and_reports_the_memory_that_is_here(
    parts: RigObjects, notices: Notices, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MachineSteps, "steps", lambda machine: [Step("device", "Looking", machine._listed)])
    path = tmp_path / "rig.json"
    write_rig(path, Rig((CARD,), LARGE_HOST))
    parts.files.open(path)
    qtbot.waitUntil(lambda: parts.live.devices.from_file)
    shown = parts.live.devices
    background = Background()
    examiner = Examiner(parts.live, parts.search, lambda: (), background, notices)
    reports: list[Report] = []
    examiner.finished.connect(reports.append)
    # After the check the devices are searched for and judged again.
    searches: list[object] = []
    monkeypatch.setattr(parts.live, "set_devices", searches.append)
    with qtbot.waitSignal(examiner.finished):
        examiner.start()
    totals = {check.device: check.figures["total_bytes"] for check in reports[0].checks}
    assert totals["CPU"] == read_host_memory().total_bytes
    assert "CUDA0" not in totals
    qtbot.waitUntil(lambda: bool(searches))
    (after,) = searches
    assert after == shown
    background.close()
    examiner.close()
