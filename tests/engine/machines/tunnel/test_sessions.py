"""Pairing and sessions over real sockets: accepted and refused callers, and the messages to both sides."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.devices.endpoint import GreetingStatus
from engine.machines.tunnel import listener
from engine.machines.tunnel.calling import ask_offer, pair_with
from engine.machines.tunnel.offers import CALL_TIMEOUT_S, MAX_OFFERED, TunnelError
from engine.machines.tunnel.pairing import GUESSED_OUT, MAX_GUESSES
from engine.machines.tunnel.pairings import PairingError
from engine.machines.tunnel.streams import BrokenTalkError, Stream
from tests.support.descriptors import many_files
from tests.support.patience import DEADLINE_S
from tests.support.tunnels import Attic, Home, Session, attic, echoing, relaying_middle

WRONG = "AAAA-AAAA-AAAA-AAAA"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Attic]:
    with echoing() as reach, attic(tmp_path / "attic", reach) as machine:
        yield machine


@pytest.fixture
def laptop(tmp_path: Path) -> Home:
    return Home(tmp_path / "laptop")


def ask(session: Session, data: bytes) -> bytes:
    session.send(data)
    return session.receive(len(data))


def test_a_caller_who_comes_at_the_moment_of_the_end_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio has accepted the connection, and the task that waits for it is cancelled before it goes on."""
    accept, taken = listener._ListeningSocket.accept, list[socket.socket]()
    accepted, ended = threading.Event(), threading.Event()

    def waiting(door: listener._ListeningSocket) -> tuple[socket.socket, object]:
        found = accept(door)
        taken.append(found[0])
        accepted.set()
        ended.wait(DEADLINE_S)
        return found

    with echoing() as reach, attic(tmp_path / "attic", reach) as served:
        loop = served.listener._loop
        call = loop.call_soon_threadsafe

        def end(step: Callable[..., object]) -> None:
            call(step)
            ended.set()

        monkeypatch.setattr(listener._ListeningSocket, "accept", waiting)
        socket.create_connection(("127.0.0.1", served.listener.port)).close()
        assert accepted.wait(DEADLINE_S)
        monkeypatch.setattr(loop, "call_soon_threadsafe", end)
    assert [each.fileno() for each in taken] == [-1]


def status_of(call: Callable[[], object]) -> GreetingStatus:
    with pytest.raises(TunnelError) as caught:
        call()
    assert caught.value.summary().endswith(".")
    return caught.value.status


def test_paired_machines_know_each_other_and_talk(served: Attic, laptop: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine the first session takes longer to end than a second caller usually waits.
    monkeypatch.setattr(listener, "BUSY_S", DEADLINE_S)
    pairing = served.pair(laptop, "my laptop")
    assert (pairing.role, pairing.name, pairing.endpoint) == ("server", "attic", served.endpoint)
    assert pairing.fingerprint == served.home.identity.fingerprint
    (client,) = served.home.book.all("client")
    assert (client.name, client.fingerprint) == ("my laptop", laptop.identity.fingerprint)
    session = served.open(laptop)
    assert session.tls.version() == "TLSv1.3"
    for size in (1, 100, 70_000):
        data = os.urandom(size)
        assert ask(session, data) == data
    session.close()
    # The place is free for the next session.
    again = served.open(laptop)
    assert ask(again, b"again") == b"again"
    again.close()


def test_a_wrong_code_pairs_nobody_and_few_are_enough(served: Attic, laptop: Home) -> None:
    code = served.code.renew()
    for _ in range(MAX_GUESSES):
        assert served.problems.empty()
        with pytest.raises(PairingError, match="did not accept the code"):
            pair_with(served.endpoint, WRONG, laptop.identity, "laptop", DEADLINE_S)
    with pytest.raises(PairingError, match="shows no pairing code"):
        pair_with(served.endpoint, code, laptop.identity, "laptop", DEADLINE_S)
    assert served.home.book.all() == ()
    assert served.problems.get(timeout=DEADLINE_S) == f"No computer was paired. {GUESSED_OUT}"
    assert served.problems.empty()


def test_a_lender_that_cannot_store_the_pairing_tells_both_sides(served: Attic, laptop: Home) -> None:
    (served.home.folder / "pairings.json").mkdir()
    with pytest.raises(PairingError, match="could not store the pairing, and shows why"):
        pair_with(served.endpoint, served.code.renew(), laptop.identity, "laptop", DEADLINE_S)
    assert served.problems.get(timeout=DEADLINE_S).startswith("No computer was paired. pairings.json: ")
    assert served.paired == []


def test_a_code_serves_once(served: Attic, laptop: Home, tmp_path: Path) -> None:
    code = served.code.renew()
    pair_with(served.endpoint, code, laptop.identity, "laptop", DEADLINE_S)
    with pytest.raises(PairingError, match="shows no pairing code"):
        pair_with(served.endpoint, code, Home(tmp_path / "other").identity, "other", DEADLINE_S)


def test_somebody_in_the_middle_with_certificates_of_his_own_pairs_nobody(
    served: Attic, laptop: Home, tmp_path: Path
) -> None:
    """He passes every word on, but TLS ends with him: what both sides prove is about different certificates."""
    middle = Home(tmp_path / "middle")
    with relaying_middle(served, middle) as endpoint, pytest.raises((PairingError, TunnelError)):
        pair_with(endpoint, served.code.renew(), laptop.identity, "laptop", DEADLINE_S)
    assert served.home.book.all() == ()


def test_who_is_not_paired_is_told_so(served: Attic, laptop: Home) -> None:
    certificate = served.home.identity.certificate
    call = status_of(lambda: Session(served.endpoint, certificate, laptop.identity, DEADLINE_S))
    assert call is GreetingStatus.UNTRUSTED


def test_another_certificate_is_told_before_anything_is_sent(served: Attic, laptop: Home, tmp_path: Path) -> None:
    other = Home(tmp_path / "other").identity.certificate
    with pytest.raises(TunnelError, match="another certificate than when it was paired"):
        Session(served.endpoint, other, laptop.identity, DEADLINE_S)


def test_a_forgotten_machine_is_put_out_and_stays_out(served: Attic, laptop: Home) -> None:
    served.pair(laptop)
    session = served.open(laptop)
    assert ask(session, b"still here") == b"still here"
    served.home.book.forget("laptop")
    # It ends without a word from us.
    with pytest.raises(BrokenTalkError):
        session.receive(1)
    session.close()
    assert status_of(lambda: served.open(laptop)) is GreetingStatus.UNTRUSTED


def test_one_session_at_a_time_and_the_next_is_told(served: Attic, laptop: Home) -> None:
    served.pair(laptop)
    session = served.open(laptop)
    assert status_of(lambda: served.open(laptop)) is GreetingStatus.BUSY
    assert ask(session, b"unharmed") == b"unharmed"
    session.close()


def test_a_session_of_our_own_is_not_told_as_that_of_another_computer(
    served: Attic, laptop: Home, tmp_path: Path
) -> None:
    garden = Home(tmp_path / "garden")
    served.pair(laptop)
    served.pair(garden, "garden")
    session = served.open(laptop, "CPU")
    with pytest.raises(TunnelError, match="still holds a session of this computer; try again"):
        served.open(laptop, "CPU")
    with pytest.raises(TunnelError, match="is used by laptop now; wait until it is free"):
        served.open(garden, "CPU")
    session.close()


def test_a_worker_that_is_gone_is_told(laptop: Home, tmp_path: Path) -> None:
    def nobody() -> socket.socket:
        raise ConnectionRefusedError

    with attic(tmp_path / "attic", nobody) as served:
        served.pair(laptop)
        with pytest.raises(TunnelError, match="its RPC worker does not run"):
            served.open(laptop)


def test_a_session_that_cannot_be_told_to_the_lender_leaves_its_worker(
    laptop: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rig serve` prints each session, and its standard error may be closed."""

    def broken(_: object) -> None:
        raise BrokenPipeError

    with (
        socket.create_server(("127.0.0.1", 0)) as worker,
        attic(tmp_path / "attic", lambda: socket.create_connection(worker.getsockname())) as served,
    ):
        served.pair(laptop)
        monkeypatch.setattr(served.listener, "_on_use", broken)
        session = served.open(laptop)
        connection, _ = worker.accept()
        with connection:
            connection.settimeout(DEADLINE_S)
            assert connection.recv(1) == b""
        session.close()
        assert served.listener.uses == ()


def test_nobody_there_and_somebody_else_are_told_apart(laptop: Home) -> None:
    certificate = laptop.identity.certificate
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        silent = lambda: Session(f"127.0.0.1:{port}", certificate, laptop.identity, 0.2)  # noqa: E731
        assert status_of(silent) is GreetingStatus.TIMED_OUT
    refused = lambda: Session(f"127.0.0.1:{port}", certificate, laptop.identity, DEADLINE_S)  # noqa: E731
    assert status_of(refused) is GreetingStatus.REFUSED
    with echoing() as reach, reach() as known:
        port = known.getpeername()[1]
        echoed = lambda: Session(f"127.0.0.1:{port}", certificate, laptop.identity, DEADLINE_S)  # noqa: E731
        assert status_of(echoed) is GreetingStatus.NOT_RPC


@pytest.mark.parametrize(
    ("device", "error", "status"),
    [
        ("", errno.EHOSTUNREACH, GreetingStatus.REFUSED),
        ("CPU", errno.ENETDOWN, GreetingStatus.REFUSED),
        ("", errno.ECONNRESET, GreetingStatus.UNTRUSTED),
        ("CPU", errno.EPIPE, GreetingStatus.UNTRUSTED),
        ("CPU", errno.ETIMEDOUT, GreetingStatus.TIMED_OUT),
    ],
)
def test_a_network_that_goes_after_the_handshake_is_not_told_as_a_lost_pairing(
    served: Attic, laptop: Home, monkeypatch: pytest.MonkeyPatch, device: str, error: int, status: GreetingStatus
) -> None:
    served.pair(laptop)

    async def broken(*_: object) -> bytes:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Stream, "receive", broken)
    assert status_of(lambda: served.open(laptop, device)) is status


def test_a_greeting_has_time_for_a_call_that_finds_the_place_taken() -> None:
    assert listener.BUSY_S < CALL_TIMEOUT_S < 2.0


def test_a_process_with_many_open_files_pairs_and_talks(laptop: Home, tmp_path: Path) -> None:
    with many_files(), echoing() as reach, attic(tmp_path / "attic", reach) as served:
        served.pair(laptop)
        session = served.open(laptop)
        assert ask(session, b"hello") == b"hello"
        session.close()


def test_a_caller_whose_task_never_began_is_closed_with_the_listener(
    laptop: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener that ends cancels tasks that it has just made."""
    taken: list[socket.socket] = []
    has_cancelled = threading.Event()
    made = listener._Caller

    def ending(connection: socket.socket, address: str, begun_s: float) -> object:
        caller = made(connection, address, begun_s)
        taken.append(connection)

        def cancel() -> None:
            assert caller.task is not None
            caller.task.cancel()
            has_cancelled.set()

        # Before the first step of the task, which is made after this call.
        asyncio.get_running_loop().call_soon(cancel)
        return caller

    monkeypatch.setattr(listener, "_Caller", ending)
    with (
        echoing() as reach,
        attic(tmp_path / "attic", reach) as served,
        socket.create_connection(("127.0.0.1", served.listener.port)),
    ):
        assert has_cancelled.wait(DEADLINE_S)
    assert [each.fileno() for each in taken] == [-1]


def test_one_machine_uses_all_devices_that_can_be_lent(laptop: Home, tmp_path: Path) -> None:
    names = [f"CUDA{number}" for number in range(MAX_OFFERED)]
    with echoing() as reach, attic(tmp_path / "attic", reach, names) as served, ExitStack() as stack:
        served.pair(laptop)
        for name in names:
            session = served.open(laptop, name)
            stack.callback(session.close)
            assert ask(session, name.encode()) == name.encode()
        # It may ask again and again what is lent, while it uses all.
        asked = ask_offer(served.endpoint, served.home.identity.certificate, laptop.identity, DEADLINE_S)
        assert all(each.is_yours for each in asked.devices)
