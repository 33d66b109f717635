"""Tunnel calls with wrong clocks, broken links and odd callers: each ends in time, with an error about the machine."""

from __future__ import annotations

import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError
from engine.devices.endpoint import GreetingStatus, greet_all, parse_endpoint
from engine.machines.rigs.secure_serving import SecureAddress, serve_secure
from engine.machines.tunnel import identity
from engine.machines.tunnel.calling import ask_offer, pair_with
from engine.machines.tunnel.door import TRUST_VARIABLE
from engine.machines.tunnel.offers import TunnelError
from engine.machines.tunnel.pairing import OpenCode
from engine.machines.tunnel.pairings import Pairing, PairingError
from engine.machines.tunnel.streams import BrokenTalkError
from engine.machines.tunnel.tunnels import Tunnels
from tests.support.faulty_relay import ONE_MBIT, Fault, Relay
from tests.support.patience import DEADLINE_S
from tests.support.rpc_peers import rpc_server
from tests.support.tunnels import Attic, Home, Session, attic, echoing


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Attic]:
    with echoing() as reach, attic(tmp_path / "attic", reach) as machine:
        yield machine


@pytest.fixture
def relay(served: Attic) -> Iterator[Relay]:
    with Relay(served.listener.port) as between:
        yield between


@pytest.fixture
def laptop(tmp_path: Path) -> Home:
    return Home(tmp_path / "laptop")


@pytest.mark.parametrize("years", [(2090, 2099), (1971, 1980)])
def test_a_wrong_clock_keeps_nobody_out(
    tmp_path: Path, laptop: Home, monkeypatch: pytest.MonkeyPatch, years: tuple[int, int]
) -> None:
    """For certificates of another time every clock is wrong."""
    first, last = (datetime(year, 1, 1, tzinfo=UTC) for year in years)
    monkeypatch.setattr(identity, "_FROM", first)
    monkeypatch.setattr(identity, "_UNTIL", last)
    with echoing() as reach, attic(tmp_path / "attic", reach) as served:
        served.pair(laptop)
        session = served.open(laptop)
        session.send(b"at what time?")
        assert session.receive(13) == b"at what time?"
        session.close()


def test_of_two_that_pair_at_once_one_does(served: Attic, tmp_path: Path) -> None:
    code, both = served.code.renew(), threading.Barrier(2)
    found: list[Pairing | EngineError] = []

    def pair(home: Home) -> None:
        own = home.identity
        both.wait(DEADLINE_S)
        try:
            found.append(pair_with(served.endpoint, code, own, home.folder.name, DEADLINE_S))
        except EngineError as error:
            found.append(error)

    threads = [threading.Thread(target=pair, args=(Home(tmp_path / name),)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    (pairing,) = [each for each in found if isinstance(each, Pairing)]
    (refused,) = [each for each in found if isinstance(each, PairingError)]
    assert refused.summary().startswith(served.endpoint)
    (client,) = served.home.book.all("client")
    assert (tmp_path / client.name).is_dir()
    assert pairing.fingerprint == served.home.identity.fingerprint


def test_two_windows_of_one_computer_have_one_key(tmp_path: Path) -> None:
    home, both = Home(tmp_path / "laptop"), threading.Barrier(2)
    found: list[str] = []

    def read() -> None:
        both.wait(DEADLINE_S)
        found.append(home.identity.fingerprint)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert found == [home.identity.fingerprint] * 2


def told_by(call: Callable[[], object]) -> str:
    """Return the sentence of a failed call; empty if it did not fail."""
    try:
        call()
    except TunnelError as error:
        return error.summary()
    return ""


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.INSERT])
@pytest.mark.parametrize("at_bytes", [0, 3, 8, 20, 300, 900, 1500, 1700])
def test_bytes_that_a_relay_changes_are_never_taken(
    served: Attic, relay: Relay, laptop: Home, fault: Fault, at_bytes: int
) -> None:
    """The first eight bytes are the preface. The handshake and the offer take about 1,900."""
    served.pair(laptop)
    certificate = served.home.identity.certificate
    ask = partial(ask_offer, relay.endpoint, certificate, laptop.identity)
    relay.arm(fault, at_bytes)
    # A change after the last byte that counts has no effect.
    told = told_by(lambda: ask(1.0))
    assert not told or (told.startswith(relay.endpoint) and told.endswith("."))
    relay.heal()
    offer = ask(DEADLINE_S)
    assert [device.name for device in offer.devices] == ["CPU"]


def test_a_flipped_bit_ends_a_session(served: Attic, relay: Relay, laptop: Home) -> None:
    served.pair(laptop)
    session = Session(relay.endpoint, served.home.identity.certificate, laptop.identity)
    relay.arm(Fault.FLIP, 5000)
    answers = 0
    with suppress(OSError, BrokenTalkError):
        while answers < 100:
            session.send(bytes(1000))
            # No changed byte is ever received.
            assert session.receive(1000) == bytes(1000)
            answers += 1
    assert answers < 10
    session.close()


def test_a_silent_link_ends_a_call_in_time(served: Attic, relay: Relay, laptop: Home) -> None:
    served.pair(laptop)
    relay.arm(Fault.SILENT)
    with pytest.raises(TunnelError, match=f"{relay.endpoint} did not answer within 0.5 s; check the address") as caught:
        ask_offer(relay.endpoint, served.home.identity.certificate, laptop.identity, 0.5)
    assert caught.value.status is GreetingStatus.TIMED_OUT


def test_a_link_at_one_megabit_is_slow_and_nothing_else(served: Attic, laptop: Home) -> None:
    served.pair(laptop)
    with Relay(served.listener.port, bytes_per_second=ONE_MBIT) as relay:
        session = Session(relay.endpoint, served.home.identity.certificate, laptop.identity)
        data = bytes(range(256)) * 200
        session.send(data)
        assert session.receive(len(data)) == data
        session.close()


def test_another_version_of_the_engine_is_told_of_the_machine(tmp_path: Path, laptop: Home) -> None:
    newer = struct.pack("<QBBBB", 28, 8, 0, 0, 0) + bytes(24)
    with (
        rpc_server(answer=newer) as worker,
        attic(tmp_path / "attic", lambda: socket.create_connection(parse_endpoint(worker))) as served,
        Tunnels(laptop.folder / "identity.pem", laptop.book) as tunnels,
    ):
        pairing = served.pair(laptop)
        routes = {pairing.endpoint: tunnels.route(pairing.endpoint, pairing.fingerprint)}
        greeting = greet_all([pairing.endpoint], DEADLINE_S, routes=routes)[pairing.endpoint]
    assert greeting.status is GreetingStatus.WRONG_VERSION
    assert greeting.sentence.startswith(f"{pairing.endpoint} speaks version 8.0 of the RPC protocol")
    assert greeting.sentence.endswith("run the same release on both computers.")


def test_nothing_is_lent_where_other_users_could_reach_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRUST_VARIABLE, raising=False)
    home = Home(tmp_path / "attic")
    address = SecureAddress("127.0.0.1", 0, "attic", home.identity, home.book, OpenCode())
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(EngineError, match=f"any user of this computer could use the tunnel .* set {TRUST_VARIABLE}=1"):
        serve_secure(
            address,
            (),
            kept=None,
            until=CancelToken(),
            on_serving=lambda _lent: pytest.fail("it serves"),
            on_paired=lambda _pairing: None,
        )
