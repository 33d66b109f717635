"""The tunnel's listener under attack: invalid bytes, silent and many callers, and paired machines that misbehave."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from engine.base.values import replace
from engine.machines.tunnel import listener
from engine.machines.tunnel.calling import pair_with
from engine.machines.tunnel.listener import MAX_OF_ONE_ADDRESS
from engine.machines.tunnel.offers import TunnelError
from engine.machines.tunnel.pairing import Offer, Verdict, Welcome
from engine.machines.tunnel.pairings import make_pairing
from engine.machines.tunnel.streams import MAX_FRAME_BYTES, Purpose, Stream, calling_context, tls_stream
from tests.support.patience import DEADLINE_S, wait_until
from tests.support.tunnels import Attic, Home, attic, echoing


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Attic]:
    with echoing() as reach, attic(tmp_path / "attic", reach) as machine:
        yield machine


@pytest.fixture
def laptop(tmp_path: Path) -> Home:
    return Home(tmp_path / "laptop")


def call(served: Attic) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", served.listener.port))
    connection.settimeout(DEADLINE_S)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Wait for the end of a connection that may say something before."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def serves(served: Attic, home: Home) -> bool:
    # A session before may still be ending, and a caller that comes meanwhile is told soon that the device is in use.
    wait_until(lambda: not served.listener.uses)
    session = served.open(home)
    session.send(b"hello")
    answer = session.receive(5)
    session.close()
    return answer == b"hello"


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: attic\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        bytes(4096),
        struct.pack("<BQ", 14, 24) + bytes(24),
        b"LDTP1 X\n",
        Purpose.SESSION.value.encode() + os.urandom(4096),
        Purpose.PAIRING.value.encode() + b"\x16\x03\x01\xff\xff" + bytes(70000),
    ],
    ids=["http", "bare TLS", "zeros", "plain RPC", "other version", "garbage for TLS", "too long a record"],
)
def test_what_is_no_tunnel_is_closed_and_harms_nobody(served: Attic, laptop: Home, garbage: bytes) -> None:
    served.pair(laptop)
    with call(served) as connection:
        with suppress(ConnectionError):
            connection.sendall(garbage)
        assert is_closed(connection)
    assert serves(served, laptop)


def test_a_crowd_of_silent_callers_is_bounded_and_the_next_is_served(
    served: Attic, laptop: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.pair(laptop)
    monkeypatch.setattr(listener, "HELLO_S", 0.5)
    with ExitStack() as stack:
        crowd = [stack.enter_context(call(served)) for _ in range(60)]
        assert len(served.listener._callers) <= MAX_OF_ONE_ADDRESS
        for each in crowd:
            assert is_closed(each)
    deadline_s = time.monotonic() + DEADLINE_S
    while served.listener._callers and time.monotonic() < deadline_s:
        threading.Event().wait(0.01)
    monkeypatch.undo()
    assert serves(served, laptop)


@pytest.mark.parametrize("greeting", [b"", b"LDTP1", Purpose.PAIRING.value.encode()], ids=["silent", "half", "pairing"])
def test_strangers_at_the_address_of_a_paired_machine_do_not_lock_it_out(
    served: Attic, laptop: Home, monkeypatch: pytest.MonkeyPatch, greeting: bytes
) -> None:
    served.pair(laptop)
    monkeypatch.setattr(listener, "HELLO_S", DEADLINE_S)
    monkeypatch.setattr(listener, "PAIRING_S", DEADLINE_S)
    with ExitStack() as stack:
        for _ in range(MAX_OF_ONE_ADDRESS):
            stack.enter_context(call(served)).sendall(greeting)
        assert serves(served, laptop)
        assert serves(served, laptop)
        assert len(served.listener._callers) <= MAX_OF_ONE_ADDRESS


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limit")
def test_a_machine_pairs_with_many_files_open(served: Attic, laptop: Home) -> None:
    """`select` takes no descriptors from 1,024 on."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        served.pair(laptop)
        assert serves(served, laptop)
    finally:
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_sends_a_byte_now_and_then_has_no_more_time(served: Attic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HELLO_S", 0.5)
    with call(served) as connection:
        connection.sendall(b"LDTP1")
        assert is_closed(connection)


Turn = Callable[[Stream, Home], Awaitable[None]]


async def long_frame(stream: Stream, _home: Home) -> None:
    await stream.send(struct.pack("!H", MAX_FRAME_BYTES + 1) + bytes(100))


async def no_message(stream: Stream, _home: Home) -> None:
    await stream.send(struct.pack("!H", 5) + b"\xff\x00[[{")


async def large_certificate(stream: Stream, _home: Home) -> None:
    await stream.send_message(Offer(bytes(16), bytes(8000), "x", os.urandom(32)))


async def no_certificate(stream: Stream, home: Home) -> None:
    await stream.send_message(Offer(bytes(16), home.identity.certificate + b"x", "x", os.urandom(32)))


async def wrong_proof(stream: Stream, home: Home) -> None:
    await stream.send_message(Offer(bytes(16), home.identity.certificate, "x", os.urandom(32)))
    assert (await stream.receive_message(Verdict)).proof == b""


async def certificate_of_no_version(stream: Stream, home: Home) -> None:
    certificate = home.identity.certificate.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x09")
    assert certificate != home.identity.certificate
    await stream.send_message(Offer(bytes(16), certificate, "x", os.urandom(32)))


@pytest.mark.parametrize(
    "turn",
    [long_frame, no_message, large_certificate, no_certificate, certificate_of_no_version, wrong_proof],
)
def test_a_pairing_that_turns_pairs_nobody(served: Attic, laptop: Home, turn: Turn) -> None:
    code = served.code.renew()

    async def talk() -> None:
        connection = call(served)
        connection.sendall(Purpose.PAIRING.value.encode())
        stream = await tls_stream(connection, calling_context(laptop.identity, None))
        assert not (await stream.receive_message(Welcome)).refusal
        with suppress(OSError):
            await turn(stream, laptop)
            await stream.wait_for_end()
        await stream.close()

    asyncio.run(asyncio.wait_for(talk(), DEADLINE_S))
    assert served.home.book.all() == ()
    assert served.code.current == code
    served.pair(laptop)


def test_an_older_tls_is_refused(served: Attic, laptop: Home) -> None:
    served.pair(laptop)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with call(served) as connection:
        connection.sendall(Purpose.SESSION.value.encode())
        with pytest.raises((ssl.SSLError, ConnectionError)):
            context.wrap_socket(connection)


def test_a_session_that_reads_nothing_holds_up_itself_alone(served: Attic, laptop: Home) -> None:
    served.pair(laptop)
    session = served.open(laptop)
    sent = 0
    with suppress(TimeoutError):
        while sent < 1 << 30:
            session.send_for(bytes(1 << 16), 0.5)
            sent += 1 << 16
    assert sent < 256 << 20
    session.close()
    assert serves(served, laptop)


@pytest.mark.parametrize("ending", [b"", b"x" * 50], ids=["none", "more"])
def test_who_knows_the_code_and_shows_no_certificate_locks_nobody_out(
    served: Attic, laptop: Home, tmp_path: Path, ending: bytes
) -> None:
    served.pair(laptop)
    other = Home(tmp_path / "other").identity
    certificate = other.certificate + ending if ending else b"no certificate"
    with pytest.raises(TunnelError):
        pair_with(served.endpoint, served.code.renew(), replace(other, certificate=certificate), "x", DEADLINE_S)
    assert len(served.home.book.all()) == 1
    # as an earlier release kept it, or a damaged file has it
    served.home.book.add(make_pairing("client", "x", certificate))
    assert serves(served, laptop)
