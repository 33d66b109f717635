"""Devices > Find Computers Nearby: a machine is found, paired by its code, added as a device, and removed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

from app.background import Background
from app.notices import Notices
from app.rig.limit_store import LimitStore
from app.rig.live_rig import LiveRig
from app.rig.peers import INTERFACES_VARIABLE, Found, Peers, list_machines
from app.window.devices.nearby_dialog import NearbyDialog, NearbyPresenter
from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.endpoint import parse_endpoint
from engine.machines.rigs.lab import LabRig
from engine.machines.tunnel.local_network import Announcement
from engine.machines.tunnel.pairings import make_pairing
from engine.runtime.protocol.network import NearbyMachine
from tests.support.tunnels import Attic, attic


@pytest.fixture
def window(qtbot: QtBot) -> QWidget:
    widget = QWidget()
    qtbot.addWidget(widget)
    widget.show()
    return widget


@pytest.fixture
def live(window: QWidget) -> LiveRig:
    return LiveRig(window)


@pytest.fixture
def peers(window: QWidget, live: LiveRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    monkeypatch.setenv(INTERFACES_VARIABLE, "127.0.0.1")
    background = Background(window)
    peers = Peers(live, LimitStore(), background, Notices(window), folder=tmp_path / "window", parent=window)
    yield peers
    background.close()
    peers.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Attic]:
    """A machine with a real worker behind its tunnel."""
    with LabRig([64 * MIB]) as lab:
        address = parse_endpoint(lab.rig.devices[0].endpoint or "")
        with attic(tmp_path / "attic", lambda: socket.create_connection(address)) as machine:
            yield machine


def rows(dialog: NearbyDialog, served: Attic) -> list[list[str]]:
    """Return the rows of this machine: other tests may announce themselves meanwhile."""
    table = dialog.table
    items = [[table.item(row, column) for column in range(table.columnCount())] for row in range(table.rowCount())]
    texts = [["" if item is None else item.text() for item in row] for row in items]
    return [row for row in texts if row[3] == served.endpoint]


def choose(dialog: NearbyDialog, served: Attic) -> None:
    for row in range(dialog.table.rowCount()):
        item = dialog.table.item(row, 3)
        if item is not None and item.text() == served.endpoint:
            position = dialog.table.visualItemRect(item).center()
            QTest.mouseClick(dialog.table.viewport(), Qt.MouseButton.LeftButton, pos=position)


def click(dialog: NearbyDialog, name: str) -> None:
    QTest.mouseClick(getattr(dialog, f"{name}_button"), Qt.MouseButton.LeftButton)


def test_a_machine_is_found_paired_added_and_forgotten(
    qtbot: QtBot, window: QWidget, live: LiveRig, peers: Peers, served: Attic
) -> None:
    presenter = NearbyPresenter(peers, window)
    presenter.show()
    dialog = presenter.dialog
    assert dialog is not None
    presenter.show()
    assert presenter.dialog is dialog
    assert not dialog.isModal()
    fingerprint = served.home.identity.fingerprint
    announcement = Announcement(
        "attic", "127.0.0.1", served.listener.port, device="CPU", total_bytes=64 * MIB, fingerprint=fingerprint
    )
    with announcement:
        qtbot.waitUntil(lambda: bool(rows(dialog, served)))
        assert rows(dialog, served) == [["attic", "CPU", "64.0 MiB", served.endpoint, "not paired"]]
        choose(dialog, served)
        assert dialog.address_line.text() == served.endpoint
        assert not dialog.use_button.isEnabled()
        assert not dialog.pair_button.isEnabled()

        code = served.code.renew()
        QTest.keyClicks(dialog.code_line, "AAAA-AAAA-AAAA-AAAA")
        click(dialog, "pair")
        qtbot.waitUntil(lambda: "did not accept the code" in dialog.text)
        dialog.code_line.clear()
        QTest.keyClicks(dialog.code_line, code.lower())
        click(dialog, "pair")
        qtbot.waitUntil(lambda: rows(dialog, served)[0][4] == "paired")
        assert dialog.text.startswith("Paired with attic (")
        assert dialog.code_line.text() == ""

        click(dialog, "use")
        qtbot.waitUntil(lambda: len(live.devices.rig.devices) == 1)
    (device,) = live.devices.rig.devices
    assert (device.id, device.name, device.endpoint, device.fingerprint) == (
        "attic-CPU",
        "attic · a device",
        f"{served.endpoint}/CPU",
        fingerprint,
    )
    assert device.via not in (None, served.endpoint)
    assert dialog.text == "attic was added to the devices."
    click(dialog, "use")
    qtbot.waitUntil(lambda: "is already among the devices" in dialog.text)
    # It announces itself no more, but is there: it is asked at the address of its pairing.
    qtbot.waitUntil(lambda: rows(dialog, served)[0][4] == "paired, reachable at its address")
    click(dialog, "forget")
    qtbot.waitUntil(lambda: not rows(dialog, served))
    assert "was deleted on this computer" in dialog.text
    click(dialog, "close")
    assert presenter.dialog is None


def test_a_machine_paired_by_its_address_is_selected_and_can_be_added(
    qtbot: QtBot, window: QWidget, live: LiveRig, peers: Peers, served: Attic
) -> None:
    dialog = NearbyDialog(window, peers)
    dialog.show()
    QTest.keyClicks(dialog.address_line, served.endpoint)
    QTest.keyClicks(dialog.code_line, served.code.renew())
    click(dialog, "pair")
    qtbot.waitUntil(lambda: bool(rows(dialog, served)))
    assert dialog.selected is not None
    assert dialog.selected.endpoint == served.endpoint
    assert dialog.use_button.isEnabled()
    assert dialog.use_button.isDefault()
    qtbot.waitUntil(lambda: rows(dialog, served)[0][4] == "paired, reachable at its address")
    click(dialog, "close")


def test_a_machine_that_cannot_be_called_is_told_in_the_dialog(
    qtbot: QtBot, window: QWidget, live: LiveRig, peers: Peers
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"127.0.0.1:{listening.getsockname()[1]}"
    dialog = NearbyDialog(window, peers)
    dialog.show()
    QTest.keyClicks(dialog.address_line, endpoint)
    QTest.keyClicks(dialog.code_line, "k7qm3xhd9rwpt2fv")
    click(dialog, "pair")
    qtbot.waitUntil(lambda: "refused the connection" in dialog.text)
    assert dialog.text.startswith(endpoint)
    click(dialog, "close")


def test_paired_machines_come_first_and_once() -> None:
    attic = make_pairing("server", "attic", b"attic", "192.0.2.1:1")
    cellar = make_pairing("server", "cellar", b"cellar", "192.0.2.2:1")
    moved = NearbyMachine("other name", "192.0.2.9:1", "CUDA0", 5, attic.fingerprint)
    stranger = NearbyMachine("garden", "192.0.2.3:1", "CPU", 7, "ab" * 32)
    impostor = NearbyMachine("cellar", "192.0.2.2:1", "CPU", 7, "cd" * 32)
    known = Found("attic", "192.0.2.9:1", attic.fingerprint, "CUDA0", 5, is_announced=True, is_paired=True)
    unknown = Found("garden", "192.0.2.3:1", "ab" * 32, "CPU", 7, is_announced=True)
    assert list_machines([stranger, moved, impostor], [attic, cellar]) == (
        known,
        Found("cellar", "192.0.2.2:1", cellar.fingerprint, is_paired=True),
        unknown,
        replace(unknown, name="cellar", endpoint="192.0.2.2:1", fingerprint="cd" * 32, is_changed=True),
    )
