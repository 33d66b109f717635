"""The tunnel's child: it forwards greetings, reports unreachable machines, and ends with its parent."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from engine.base.errors import EngineError
from engine.base.values import replace
from engine.devices.device import Device, Rig
from engine.devices.endpoint import Greeting, GreetingStatus, greet_all, make_notice, parse_endpoint, read_notice
from engine.devices.rig_file import encode_rig, parse_rig
from engine.machines.rigs.discovery import host_device
from engine.machines.tunnel import calling, listener
from engine.machines.tunnel.calling import Forwarder
from engine.machines.tunnel.offers import STRANGER
from engine.machines.tunnel.tunnels import Tunnels
from tests.support.patience import DEADLINE_S
from tests.support.rpc_peers import rpc_server
from tests.support.tunnels import Attic, Home, attic, echoing


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Attic]:
    with rpc_server() as endpoint:
        address = parse_endpoint(endpoint)
        with attic(tmp_path / "attic", lambda: socket.create_connection(address)) as machine:
            yield machine


@pytest.fixture
def laptop(tmp_path: Path, served: Attic) -> Home:
    home = Home(tmp_path / "laptop")
    served.pair(home)
    return home


def tunnels_of(home: Home) -> Tunnels:
    return Tunnels(home.folder / "identity.pem", home.book)


def rig_of(served: Attic) -> Rig:
    device = Device(
        "RPC0",
        "attic",
        "RPC",
        "gpu",
        1 << 30,
        endpoint=served.endpoint,
        fingerprint=served.home.identity.fingerprint,
    )
    return Rig((device,), host_device())


def greeting(rig: Rig) -> Greeting:
    (device,) = rig.devices
    assert device.endpoint is not None
    routes = {device.endpoint: device.via or ""}
    return greet_all([device.endpoint], DEADLINE_S, routes=routes)[device.endpoint]


def test_a_greeting_goes_through_and_names_the_machine(
    served: Attic, laptop: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the first greeting's session takes longer to end than a second caller usually waits.
    monkeypatch.setattr(listener, "BUSY_S", DEADLINE_S)
    with tunnels_of(laptop) as tunnels:
        rig = tunnels.reach(rig_of(served))
        assert rig.devices[0].via not in (None, served.endpoint)
        for _ in range(2):
            found = greeting(rig)
            assert found.ok, found
            assert found.sentence == f"{served.endpoint} answers."
        # One child for a machine, however often it is asked for.
        assert tunnels.reach(rig_of(served)).devices[0].via == rig.devices[0].via
        assert parse_rig(encode_rig(rig)).devices[0].via is None


def test_why_it_does_not_go_through_is_told_of_the_machine(served: Attic, laptop: Home) -> None:
    with tunnels_of(laptop) as tunnels:
        rig = tunnels.reach(rig_of(served))
        served.home.book.forget("laptop")
        found = greeting(rig)
        assert found.status is GreetingStatus.UNTRUSTED
        assert found.sentence == f"{served.endpoint} {STRANGER}."


def test_a_machine_that_is_not_paired_is_asked_by_nobody(served: Attic, tmp_path: Path) -> None:
    with tunnels_of(Home(tmp_path / "stranger")) as tunnels:
        rig = tunnels.reach(rig_of(served))
        assert rig.devices[0].via is None
        found = greeting(rig)
    assert found.status is GreetingStatus.UNTRUSTED
    assert "not paired with this computer" in found.sentence


def test_a_forwarder_that_dies_is_started_again_on_its_port(
    served: Attic, laptop: Home, caplog: pytest.LogCaptureFixture
) -> None:
    with tunnels_of(laptop) as tunnels:
        rig = tunnels.reach(rig_of(served))
        before = {child.pid for child in psutil.Process().children()}
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        deadline_s = time.monotonic() + DEADLINE_S
        again = f"the tunnel to {served.endpoint} is started again"
        # A process that was killed may answer once more before it ends.
        while not ((found := greeting(rig)).ok and again in caplog.text) and time.monotonic() < deadline_s:
            assert found.ok or "tunnel" in found.sentence
        assert found.ok
        assert again in caplog.text
        assert before.isdisjoint(child.pid for child in psutil.Process().children())
    assert not psutil.Process().children()


def device_of(served: Attic, name: str) -> Rig:
    (device,) = rig_of(served).devices
    return Rig((replace(device, endpoint=f"{served.endpoint}/{name}"),), host_device())


def test_a_machine_that_is_forgotten_here_loses_its_sessions_and_its_tunnel(tmp_path: Path) -> None:
    laptop = Home(tmp_path / "laptop")
    with echoing() as echo, attic(tmp_path / "attic", echo) as served, tunnels_of(laptop) as tunnels:
        served.pair(laptop)
        (device,) = tunnels.reach(device_of(served, "CPU")).devices
        with socket.create_connection(parse_endpoint(device.via or ""), DEADLINE_S) as session:
            session.sendall(b"x")
            assert session.recv(1) == b"x"
            laptop.book.forget("attic")
            with suppress(ConnectionResetError):
                assert session.recv(1) == b""
        assert tunnels.reach(device_of(served, "CPU")).devices[0].via is None
        served.pair(laptop)
        (again,) = tunnels.reach(device_of(served, "CPU")).devices
        with socket.create_connection(parse_endpoint(again.via or ""), DEADLINE_S) as session:
            session.sendall(b"x")
            assert session.recv(1) == b"x"
    assert not psutil.Process().children()


def test_a_device_that_gets_no_port_leaves_the_others_theirs(tmp_path: Path) -> None:
    laptop = Home(tmp_path / "laptop")
    key = laptop.folder / "identity.pem"
    with echoing() as echo, attic(tmp_path / "attic", {"A": echo, "B": echo}) as served, tunnels_of(laptop) as tunnels:
        served.pair(laptop)
        first = tunnels.reach(device_of(served, "A")).devices
        kept = key.read_bytes()
        key.write_bytes(b"x")
        with pytest.raises(EngineError, match="is damaged"):
            tunnels.reach(device_of(served, "B"))
        key.write_bytes(kept)
        tunnels.reach(device_of(served, "B"))
        assert tunnels.reach(device_of(served, "A")).devices == first
        assert len(psutil.Process().children()) == 1
    assert not psutil.Process().children()


def test_another_user_of_this_computer_is_not_let_in(
    served: Attic, laptop: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forwarder asks the system whose a connection is; here it is told that it is of somebody else."""
    monkeypatch.setattr(calling, "is_our_user", lambda _caller: False)

    async def call() -> bytes:
        forwarder = Forwarder(served.endpoint, served.home.identity.certificate, laptop.identity)
        running = asyncio.create_task(forwarder.run())
        reader, writer = await asyncio.open_connection("127.0.0.1", forwarder.port)
        said = await reader.read(1)
        writer.close()
        await writer.wait_closed()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return said

    assert asyncio.run(asyncio.wait_for(call(), DEADLINE_S)) == b""


def test_a_caller_that_is_gone_at_once_leaves_the_tunnel_open(
    served: Attic, laptop: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is reset before it is taken has no peer name any more."""
    asked: list[object] = []

    def is_our_user(caller: object) -> bool:
        asked.append(caller)
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(calling, "is_our_user", is_our_user)

    async def call() -> int:
        forwarder = Forwarder(served.endpoint, served.home.identity.certificate, laptop.identity)
        running = asyncio.create_task(forwarder.run())
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", forwarder.port)
            assert await reader.read(1) == b""
            writer.close()
        await writer.wait_closed()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return len(asked)

    assert asyncio.run(asyncio.wait_for(call(), DEADLINE_S)) == 2


def test_a_notice_is_read_as_it_was_made_and_within_bounds() -> None:
    notice = make_notice(GreetingStatus.BUSY, "serves another program")
    assert struct.unpack_from("<Q", notice)[0] > 1 << 32
    assert read_notice(notice) == (GreetingStatus.BUSY, "serves another program")
    assert read_notice(make_notice(GreetingStatus.OK, "x"))[0] is GreetingStatus.NOT_RPC
    assert read_notice(notice[:8] + b"\xff\xfe nonsense\x1b[2J")[1].isprintable()
    assert len(make_notice(GreetingStatus.BUSY, "x" * 5000)) < 1100
