"""Devices > Lend This Computer: lending, pairing by the code, use by the other machine, and the end."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

from app import lending
from app.paths import pairings_path
from app.rig.device_list import DeviceList, list_of_file
from app.rig.lender import LendChoice, Lender
from app.rig.live_rig import LiveRig
from app.settings import Settings
from app.window.devices.lend_dialog import LendDialog, LendPresenter
from engine.base.errors import EngineError
from engine.base.units import GIB, MIB
from engine.devices.card_catalogue import with_cards
from engine.devices.device import Device, Rig
from engine.machines.rigs.secure_serving import Lending, SecureAddress
from engine.machines.tunnel.calling import pair_with
from engine.machines.tunnel.identity import Identity
from engine.machines.tunnel.listener import Use
from engine.machines.tunnel.pairing import GUESSED_OUT, LIFETIME_S, MAX_GUESSES, OpenCode
from engine.machines.tunnel.pairings import PairingError, PairingStore
from tests.support.patience import DEADLINE_S
from tests.support.ports import free_port
from tests.support.tunnels import Home, Session


@pytest.fixture(autouse=True)
def nobody_paired() -> Iterator[None]:
    pairings_path().unlink(missing_ok=True)
    yield
    pairings_path().unlink(missing_ok=True)


@pytest.fixture
def window(qtbot: QtBot) -> QWidget:
    widget = QWidget()
    qtbot.addWidget(widget)
    widget.show()
    return widget


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "settings.ini")


@pytest.fixture
def lender(window: QWidget, settings: Settings) -> Iterator[Lender]:
    made = Lender(settings, window)
    made.choice = LendChoice(host="127.0.0.1", port=free_port(), name="attic", announce=False)
    yield made
    made.close()


@pytest.fixture
def dialog(lender: Lender, window: QWidget) -> LendDialog:
    return LendPresenter(lender, LiveRig(window), window).open()


def click(dialog: LendDialog, name: str) -> None:
    QTest.mouseClick(getattr(dialog, f"{name}_button"), Qt.MouseButton.LeftButton)


def test_it_is_lent_paired_used_and_stopped(
    qtbot: QtBot, tmp_path: Path, dialog: LendDialog, lender: Lender, settings: Settings
) -> None:
    (row,) = dialog.rows
    assert row.device.id == "CPU"
    assert dialog.text == "No devices are lent."
    row.cap_line.setText("64MiB")
    click(dialog, "lend")
    qtbot.waitUntil(lambda: bool(lender.state.addresses))
    place = f"127.0.0.1:{lender.choice.port}"
    assert dialog.text == f"Devices are lent at the address {place}."
    assert row.user.text() == "not in use"
    assert not row.cap_line.isEnabled()
    before = lender.state.code
    click(dialog, "code")
    assert lender.state.code != before
    assert lender.state.code in dialog.code_label.text()

    laptop = Home(tmp_path / "laptop")
    pairing = pair_with(place, lender.state.code, laptop.identity, "laptop", DEADLINE_S)
    assert pairing.name == "attic"
    qtbot.waitUntil(lambda: "Paired with laptop" in dialog.text)
    assert "No pairing code is valid" in dialog.code_label.text()
    session = Session(place, pairing.der, laptop.identity, device="CPU")
    qtbot.waitUntil(lambda: row.user.text() == "used by laptop")
    click(dialog, "stop")
    assert dialog.text == "No devices are lent."
    assert row.user.text() == ""
    lender.close()
    session.close()
    # The choice is kept for the next window.
    assert Lender(settings).choice.caps == {"CPU": 64 * MIB}


def test_a_session_that_began_before_all_workers_ran_stays_shown(lender: Lender) -> None:
    address = SecureAddress("127.0.0.1", 1, "attic", Identity(Path(), b""), PairingStore(Path()), OpenCode())
    lender._show_uses((Use("CPU", "laptop", "ab" * 32),))
    lender._begin(address, "127.0.0.1:1", "")
    assert lender.state.users == (("CPU", "laptop"),)
    assert lender.state.code == address.code.current


def test_a_code_that_was_guessed_wrong_too_often_is_not_shown(
    qtbot: QtBot, tmp_path: Path, dialog: LendDialog, lender: Lender
) -> None:
    click(dialog, "lend")
    qtbot.waitUntil(lambda: bool(lender.state.addresses))
    for _ in range(MAX_GUESSES):
        with pytest.raises(PairingError, match="did not accept the code"):
            pair_with(lender.state.addresses, "AAAA-AAAA-AAAA-AAAA", Home(tmp_path).identity, "laptop", DEADLINE_S)
    qtbot.waitUntil(lambda: GUESSED_OUT in dialog.text)
    assert "No pairing code is valid" in dialog.code_label.text()


def test_a_code_that_has_expired_is_not_shown(
    qtbot: QtBot, dialog: LendDialog, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    click(dialog, "lend")
    qtbot.waitUntil(lambda: bool(lender.state.addresses))
    assert lender.state.code in dialog.code_label.text()
    assert 0 < lender._expiry.remainingTime() <= LIFETIME_S * 1000
    with monkeypatch.context() as patch:
        patch.setattr("engine.machines.tunnel.pairing.LIFETIME_S", 0.01)
        click(dialog, "code")
    qtbot.waitUntil(lambda: not lender.state.code)
    assert "No pairing code is valid" in dialog.code_label.text()
    assert not lender._expiry.isActive()
    click(dialog, "code")
    assert lender._expiry.isActive()
    click(dialog, "stop")
    assert not lender._expiry.isActive()


def test_a_port_in_use_is_told_and_can_be_changed(qtbot: QtBot, dialog: LendDialog, lender: Lender) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dialog.port_box.setValue(taken.getsockname()[1])
        click(dialog, "lend")
        qtbot.waitUntil(lambda: "Cannot listen on" in dialog.text)
    assert dialog.lend_button.isEnabled()
    assert dialog.port_box.isEnabled()
    click(dialog, "lend")
    qtbot.waitUntil(lambda: bool(lender.state.addresses))


def test_a_limit_that_is_none_or_too_large_is_told(dialog: LendDialog, lender: Lender) -> None:
    (row,) = dialog.rows
    for text, words in (("much", "CPU: "), ("9999GiB", "Enter at most that size")):
        row.cap_line.setText(text)
        click(dialog, "lend")
        assert words in dialog.text
        assert not lender.state.is_starting


def test_no_device_is_told(dialog: LendDialog, lender: Lender) -> None:
    (row,) = dialog.rows
    row.box.setChecked(False)
    click(dialog, "lend")
    assert dialog.text == "No device is chosen; choose at least one."
    assert not lender.state.is_starting


def test_a_device_without_a_row_is_not_lent_and_its_choice_is_kept(
    qtbot: QtBot, lender: Lender, window: QWidget, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search finds cards that the list lacks, because a rig file is open or the first search still runs."""
    asked: list[dict[str, object]] = []

    def find(**options: object) -> tuple[Lending, ...]:
        asked.append(options)
        raise EngineError("That is enough.")

    monkeypatch.setattr(lending, "find_lendings", find)
    lender.choice = msgspec.structs.replace(lender.choice, without=("CUDA0", "CPU"), caps={"CUDA1": GIB, "CPU": MIB})
    live = LiveRig(window)
    dialog = LendPresenter(lender, live, window).open()
    (row,) = dialog.rows
    assert not row.box.isChecked()
    row.box.setChecked(True)
    click(dialog, "lend")
    qtbot.waitUntil(lambda: dialog.text == "That is enough.")
    assert asked == [{"only": ("CPU",), "caps": (("CPU", MIB),)}]
    kept = Lender(settings).choice
    assert (kept.without, kept.caps) == (("CUDA0",), {"CUDA1": GIB, "CPU": MIB})
    # The search has ended.
    row.box.setChecked(False)
    host = live.devices.rig.host
    cards = tuple(Device(f"CUDA{number}", "a card", "CUDA", "gpu", 8 * GIB) for number in range(2))
    live.set_devices(DeviceList(Rig(cards, host)))
    assert [(row.device.id, row.box.isChecked()) for row in dialog.rows] == [
        ("CPU", False),
        ("CUDA0", False),
        ("CUDA1", True),
    ]
    stops, stop = list[QWidget](), dialog.rows[0].box.previousInFocusChain()
    while stop is not None and (stop := stop.nextInFocusChain()) is not dialog.address_box:
        stops.append(stop)
    controls: list[QWidget] = [control for row in dialog.rows for control in (row.box, row.cap_line)]
    assert [each for each in stops if each in controls] == controls
    click(dialog, "lend")
    qtbot.waitUntil(lambda: len(asked) == 2)
    assert asked[1] == {"only": ("CUDA1",), "caps": (("CUDA1", GIB),)}
    qtbot.waitUntil(dialog.lend_button.isEnabled)
    # A card is gone.
    dialog.rows[1].box.setChecked(True)
    live.set_devices(DeviceList(Rig(cards[:1], host)))
    assert dialog.rows[2].box.isHidden()
    click(dialog, "lend")
    qtbot.waitUntil(lambda: len(asked) == 3)
    assert asked[2] == {"only": ("CUDA0",), "caps": ()}
    assert Lender(settings).choice.caps == {"CUDA1": GIB, "CPU": MIB}


def test_choices_that_another_window_has_made_stay(
    qtbot: QtBot, lender: Lender, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(**_options: object) -> tuple[Lending, ...]:
        raise EngineError("That is enough.")

    monkeypatch.setattr(lending, "find_lendings", find)
    before = lender.choice
    settings.keep("lending", msgspec.structs.replace(before, caps={"CPU": MIB}))
    lender.start(msgspec.structs.replace(before, name="cellar"), ("CPU",))
    qtbot.waitUntil(lambda: bool(lender.state.problem))
    assert Lender(settings).choice == msgspec.structs.replace(before, name="cellar", caps={"CPU": MIB})


def test_it_is_lent_again_right_after_a_stop(
    qtbot: QtBot, dialog: LendDialog, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for devices may be quicker than the end of the workers before, which keep the port."""
    found = lending.find_lendings()
    monkeypatch.setattr(lending, "find_lendings", lambda **_: found)
    click(dialog, "lend")
    qtbot.waitUntil(lambda: bool(lender.state.addresses))
    click(dialog, "stop")
    click(dialog, "lend")
    qtbot.waitUntil(lambda: bool(lender.state.addresses or lender.state.problem))
    assert dialog.text == f"Devices are lent at the address {lender.state.addresses}."


def test_cards_that_are_not_here_are_not_offered(lender: Lender, window: QWidget) -> None:
    live = LiveRig(window)
    here = live.devices.rig
    live.set_devices(list_of_file(with_cards(here, ["RTX 3090"]), here))
    dialog = LendPresenter(lender, live, window).open()
    assert [row.device.id for row in dialog.rows] == ["CPU"]
    assert "A rig file is open" in dialog.introduction.text()
    live.set_devices(DeviceList(here))
    assert "A rig file is open" not in dialog.introduction.text()
