"""Paired machines of the rig: stored between starts, greyed out while they are away, and back by themselves."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from PySide6.QtCore import QObject
from pytestqt.qtbot import QtBot

from app.background import Background
from app.notices import Notices
from app.rig.device_list import DeviceList, list_of_file
from app.rig.known_machines import KnownMachines
from app.rig.limit_store import LimitStore
from app.rig.live_rig import LiveRig
from app.rig.peers import Found, Peers
from engine.base.errors import EngineError
from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.device import Device, Rig
from engine.devices.endpoint import parse_endpoint
from engine.devices.rig_file import read_rig, write_rig
from engine.machines.rigs.lab import LabRig
from engine.machines.tunnel.listener import Listener
from engine.machines.tunnel.streams import Stream
from engine.planning.layout.layout import Layout, Run
from tests.support.tunnels import Attic, Home, attic, echoing
from widgets.layout_editor.placement import lane_devices

NEVER_MS = 1 << 30
"""The test asks by itself."""


class Window:
    """The parts of a window that know machines."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.parent = QObject()
        self.live = LiveRig(self.parent)
        background, limits = Background(self.parent), LimitStore()
        self.limits = limits
        notices = Notices(self.parent)
        self.said: list[str] = []
        notices.given.connect(lambda notice: self.said.append(notice.text))
        self.peers = Peers(self.live, limits, background, notices, folder=folder, parent=self.parent)
        self.machines = KnownMachines(
            self.live,
            self.peers,
            limits,
            background,
            notices,
            path=folder / "machines.json",
            watch_ms=NEVER_MS,
            parent=self.parent,
        )
        for end in (background.close, self.peers.close, self.machines.close):
            stack.callback(end)

    @property
    def away(self) -> dict[str, str]:
        return {device.id: device.away for device in self.live.devices.rig.devices}

    def device(self, name: str) -> Device:
        found = self.live.devices.rig.device(name)
        assert found is not None
        return found


OpenWindow = Callable[[], Window]
PairedWindow = Callable[[Attic], Window]
Connect = Callable[[], socket.socket]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "window"


@pytest.fixture
def open_window(qtbot: QtBot, folder: Path) -> Iterator[Callable[[], Window]]:
    with ExitStack() as stack:
        yield lambda: Window(folder, stack)


@pytest.fixture
def worker() -> Iterator[Callable[[], socket.socket]]:
    with LabRig([64 * MIB]) as lab:
        address = parse_endpoint(lab.rig.devices[0].endpoint or "")
        yield lambda: socket.create_connection(address)


def add(window: Window, served: Attic, qtbot: QtBot) -> None:
    window.machines.restore()
    window.peers.add(Found("attic", served.endpoint, served.home.identity.fingerprint, is_paired=True))
    qtbot.waitUntil(lambda: bool(window.live.devices.rig.devices))


@pytest.fixture
def paired_window(qtbot: QtBot, folder: Path, open_window: OpenWindow) -> Callable[[Attic], Window]:
    """Return what opens a window that is paired with a machine and has its devices."""

    def make(served: Attic) -> Window:
        served.pair(Home(folder))
        window = open_window()
        add(window, served, qtbot)
        return window

    return make


def test_a_margin_that_was_set_here_stays_when_the_lender_changes_its_own(
    qtbot: QtBot, tmp_path: Path, paired_window: PairedWindow, worker: Connect
) -> None:
    with attic(tmp_path / "attic", worker) as served:
        window = paired_window(served)
        before = window.device("attic-CPU")
        window.live.set_devices(window.live.devices.with_limits("attic-CPU", 32 * MIB, 7 * MIB))
        window.limits.keep(window.device("attic-CPU"))
        qtbot.waitUntil(lambda: not window.machines._asked)
        window.machines.look()
        qtbot.waitUntil(lambda: not window.machines._asked)
        after = window.device("attic-CPU")
        assert (after.cap_bytes, after.margin_bytes) == (32 * MIB, 7 * MIB)
        assert before.margin_bytes != 7 * MIB


def test_a_machine_is_remembered_greyed_and_back_by_itself(
    qtbot: QtBot,
    tmp_path: Path,
    folder: Path,
    open_window: OpenWindow,
    paired_window: PairedWindow,
    worker: Connect,
) -> None:
    with attic(tmp_path / "attic", worker) as served:
        port = served.listener.port
        first = paired_window(served)
        qtbot.waitUntil((folder / "machines.json").exists)
        assert first.away == {"attic-CPU": ""}
    # The window is closed, and the machine is switched off.
    second = open_window()
    second.machines.restore()
    qtbot.waitUntil(lambda: second.away == {"attic-CPU": "not reachable"})
    device = second.device("attic-CPU")
    assert (device.available_bytes, device.total_bytes, device.via) == (0, 64 * MIB, None)
    lanes = lane_devices(second.live.rig, Layout(2, (Run("CPU", 0, 1),), "CPU"))
    assert [lane.state for lane in lanes if lane.id == "attic-CPU"] == ["not reachable"]
    qtbot.waitUntil(lambda: not second.machines._asked)
    with attic(tmp_path / "attic", worker, port=port):
        second.machines.look()
        qtbot.waitUntil(lambda: second.away == {"attic-CPU": ""})
        assert second.device("attic-CPU").via is not None
        assert second.device("attic-CPU").available_bytes > 0
        assert any("attic can be used again" in each for each in second.said)
        # What the user removes is not remembered.
        second.live.set_devices(second.live.devices.without("attic-CPU"))
        qtbot.waitUntil(lambda: read_rig(folder / "machines.json").devices == ())


def test_a_tunnel_that_does_not_open_here_says_nothing_about_the_pairing(
    qtbot: QtBot,
    tmp_path: Path,
    paired_window: PairedWindow,
    worker: Connect,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with attic(tmp_path / "attic", worker) as served:
        window = paired_window(served)

        def reach(_rig: Rig) -> Rig:
            raise EngineError("No tunnel can begin on this computer (Too many open files).")

        monkeypatch.setattr(window.peers, "reach", reach)
        window.machines.look()
        qtbot.waitUntil(lambda: window.away == {"attic-CPU": "not reachable"})


def test_a_machine_that_was_set_up_anew_is_remembered_with_its_new_certificate(
    qtbot: QtBot,
    tmp_path: Path,
    folder: Path,
    paired_window: PairedWindow,
    worker: Connect,
) -> None:
    with attic(tmp_path / "attic", worker) as served:
        window = paired_window(served)
        qtbot.waitUntil((folder / "machines.json").exists)
    # Added again after it was paired again: id and address are the same.
    devices, fingerprint = window.live.devices, "ab" * 32
    window.live.set_devices(devices.with_changed(lambda device: replace(device, fingerprint=fingerprint)))
    window.machines.look()
    qtbot.waitUntil(lambda: window.away == {"attic-CPU": "not paired"})
    qtbot.waitUntil(lambda: read_rig(folder / "machines.json").devices[0].fingerprint == fingerprint)


def test_a_machine_that_was_set_up_anew_and_paired_again_takes_the_place_of_before(
    qtbot: QtBot,
    tmp_path: Path,
    folder: Path,
    paired_window: PairedWindow,
    worker: Connect,
) -> None:
    with attic(tmp_path / "attic", worker) as served:
        port = served.listener.port
        window = paired_window(served)
    with attic(tmp_path / "attic anew", worker, port=port) as served:
        window.machines.look()
        qtbot.waitUntil(lambda: window.away == {"attic-CPU": "not paired"})
        served.pair(Home(folder))
        window.peers.add(Found("attic", served.endpoint, served.home.identity.fingerprint, is_paired=True))
        qtbot.waitUntil(lambda: window.away == {"attic-CPU": ""})
        assert window.device("attic-CPU").fingerprint == served.home.identity.fingerprint


def test_a_device_that_somebody_else_uses_comes_back_when_it_is_free(
    qtbot: QtBot, tmp_path: Path, folder: Path, open_window: OpenWindow, worker: Connect
) -> None:
    garden = Home(tmp_path / "garden")
    with echoing() as echo, attic(tmp_path / "attic", {"CUDA0": echo, "CPU": worker}) as served:
        served.pair(Home(folder))
        served.pair(garden, "garden")
        session = served.open(garden, "CUDA0")
        window = open_window()
        add(window, served, qtbot)
        assert window.away == {"attic-CUDA0": "used by garden", "attic-CPU": ""}
        session.close()
        qtbot.waitUntil(lambda: not served.listener.uses)
        window.machines.look()
        qtbot.waitUntil(lambda: window.away == {"attic-CUDA0": "", "attic-CPU": ""})


def test_a_machine_that_forgot_us_is_away_and_says_so(
    qtbot: QtBot, tmp_path: Path, paired_window: PairedWindow, worker: Connect
) -> None:
    with attic(tmp_path / "attic", worker) as served:
        window = paired_window(served)
        served.home.book.forget("laptop")
        window.machines.look()
        # Lending that ends just then looks the same.
        qtbot.waitUntil(lambda: window.away == {"attic-CPU": "not paired, or not lent now"})
        assert window.said[-1] == "attic cannot be used now: not paired, or not lent now."
        window.machines.look()
        qtbot.waitUntil(lambda: window.away == {"attic-CPU": "not paired"})


def test_a_machine_whose_lending_has_just_stopped_is_not_said_to_be_unpaired(
    qtbot: QtBot, tmp_path: Path, paired_window: PairedWindow, worker: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end(_listener: Listener, stream: Stream, *_: object) -> None:
        stream.abort()

    with attic(tmp_path / "attic", worker) as served:
        window = paired_window(served)
        qtbot.waitUntil(lambda: not window.machines._asked)
        monkeypatch.setattr(Listener, "_serve_client", end)
        window.machines.look()
        qtbot.waitUntil(lambda: window.away == {"attic-CPU": "not paired, or not lent now"})
    window.machines.look()
    qtbot.waitUntil(lambda: window.away == {"attic-CPU": "not reachable"})


def test_a_damaged_file_of_machines_begins_anew(
    qtbot: QtBot,
    tmp_path: Path,
    folder: Path,
    open_window: OpenWindow,
    worker: Connect,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder.mkdir()
    (folder / "machines.json").write_text("{", encoding="utf-8")
    with attic(tmp_path / "attic", worker) as served:
        served.pair(Home(folder))
        window = open_window()
        window.machines.restore()
        qtbot.waitUntil(lambda: "the list of machines was not read" in caplog.text)
        add(window, served, qtbot)
        qtbot.waitUntil(lambda: (folder / "machines.json").read_text(encoding="utf-8") != "{")
        assert len(read_rig(folder / "machines.json").devices) == 1


def lent(name: str, address: str, digit: str) -> Device:
    endpoint = f"{address}:50052/CUDA0"
    return Device(f"{name}-CUDA0", name, "RPC", "gpu", MIB, endpoint=endpoint, fingerprint=digit * 64)


def silence(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the window ask no machine, because the addresses are made up."""
    monkeypatch.setattr(window.machines, "look", lambda: None)


def test_machines_that_another_window_added_stay_in_the_file(
    qtbot: QtBot, folder: Path, open_window: OpenWindow, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_window(), open_window()
    for window in (first, second):
        silence(window, monkeypatch)
        window.machines.restore()
    qtbot.waitUntil(lambda: first.machines._kept == second.machines._kept == ())
    path = folder / "machines.json"

    def stored() -> list[str]:
        return [device.id for device in read_rig(path).devices] if path.exists() else []

    first.live.set_devices(first.live.devices.with_devices([lent("attic", "192.0.2.7", "a")]))
    qtbot.waitUntil(lambda: stored() == ["attic-CUDA0"])
    second.live.set_devices(second.live.devices.with_devices([lent("cellar", "192.0.2.8", "b")]))
    qtbot.waitUntil(lambda: stored() == ["cellar-CUDA0", "attic-CUDA0"])
    second.live.set_devices(second.live.devices.without("cellar-CUDA0"))
    qtbot.waitUntil(lambda: stored() == ["attic-CUDA0"])


def test_machines_come_back_after_a_rig_file(
    qtbot: QtBot, folder: Path, open_window: OpenWindow, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    attic_card, cellar_card = lent("attic", "192.0.2.7", "a"), lent("cellar", "192.0.2.8", "b")
    card = Device("CUDA0", "card", "CUDA", "gpu", MIB)
    window = open_window()
    host = window.live.devices.rig.host
    write_rig(folder / "machines.json", Rig((attic_card,), host))
    silence(window, monkeypatch)
    # As a start with --rig: a rig file comes first, then a search.
    window.live.set_devices(list_of_file(Rig((card,), host), Rig((), host)))
    window.live.set_devices(DeviceList(Rig((), host)))
    qtbot.waitUntil(lambda: window.away == {"attic-CUDA0": "not reachable"})
    window.live.set_devices(window.live.devices.with_devices([cellar_card]))
    qtbot.waitUntil(lambda: len(read_rig(folder / "machines.json").devices) == 2)
    # A rig file that is opened later removes none either.
    window.live.set_devices(list_of_file(Rig((card,), host), Rig((), host)))
    window.live.set_devices(DeviceList(Rig((), host)))
    qtbot.waitUntil(lambda: set(window.away) == {"attic-CUDA0", "cellar-CUDA0"})
    assert len(read_rig(folder / "machines.json").devices) == 2
