"""Devices > Split CPU by NUMA Node: explanation, workers, and the message on a computer with one node."""

from __future__ import annotations

import sys

import pytest
from PySide6.QtWidgets import QMessageBox
from pytestqt.qtbot import QtBot

from app.notices import Notice
from app.wiring import WindowObjects
from engine.base.numa import NumaNode, read_nodes
from engine.base.units import GIB, MIB
from engine.machines.rigs.lab import LabRig

TWO = (NumaNode(0, frozenset({0}), 8 * GIB, 4 * GIB, (10, 21)), NumaNode(1, frozenset({1}), 8 * GIB, 4 * GIB, (21, 10)))


def shown(window: WindowObjects, monkeypatch: pytest.MonkeyPatch, *nodes: NumaNode) -> QMessageBox:
    monkeypatch.setattr("app.window.dialog_actions.read_nodes", lambda: nodes)
    window.actions["split_numa"].trigger()
    (box,) = window.main.findChildren(QMessageBox)
    return box


def test_a_computer_with_one_node_says_so(window: WindowObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    box = shown(window, monkeypatch, TWO[0])
    assert box.text() == "This computer has only one NUMA node (node 0: CPUs 0, 8.00 GiB), so the CPU cannot be split."
    assert [button.text().replace("&", "") for button in box.buttons()] == ["OK"]
    box.reject()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone describes NUMA nodes")
def test_the_workers_of_the_nodes_become_devices(
    window: WindowObjects, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This computer may have one node: the rig of the test has a worker for that one.
    here = [node for node in read_nodes() if node.can_serve][:1]
    asked: list[object] = []
    told: list[Notice] = []
    window.desk.notices.given.connect(told.append)

    def rig(nodes: object, **options: object) -> LabRig:
        asked.append(nodes)
        return LabRig([32 * MIB], nodes=here, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("app.rig.lab.numa_rig", rig)
    box = shown(window, monkeypatch, *TWO)
    assert "node 0: CPUs 0, 8.00 GiB; node 1: CPUs 1, 8.00 GiB" in box.text()
    assert "Compare Speed" in box.informativeText()
    (start,) = [button for button in box.buttons() if "Start" in button.text()]
    start.click()
    live, lab = window.desk.rig.live, window.desk.rig.lab
    qtbot.waitUntil(lambda: lab.has_nodes and bool(live.rig.devices))
    assert asked == [TWO]
    assert [device.id for device in live.rig.devices] == [f"NODE{node.number}" for node in here or TWO[:1]]
    assert "NUMA nodes of this computer" in " ".join(notice.text for notice in told)
    # A second split, or a lab, would start workers nobody sees.
    lab.start_nodes(TWO)
    assert told[-1].text == "First stop the lab rig (Devices > Stop Lab Rig)"
    lab.stop()
    assert not lab.has_nodes
