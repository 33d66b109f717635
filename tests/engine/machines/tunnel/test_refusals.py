"""A borrower that crashes workers repeatedly is refused for some minutes."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.machines.tunnel import listener
from engine.machines.tunnel.calling import ask_offer
from engine.machines.tunnel.listener import Use
from engine.machines.tunnel.offers import TunnelError
from engine.machines.tunnel.refusals import MAX_ENDS, REFUSED_S, WITHIN_S, Refusals
from engine.machines.tunnel.streams import BrokenTalkError
from tests.support.patience import DEADLINE_S
from tests.support.tunnels import Attic, Home, Session, attic


def test_each_borrower_is_counted_by_itself_and_refused_for_a_while() -> None:
    now_s = [0.0]
    refusals = Refusals(lambda: now_s[0])
    assert [refusals.count("ann") for _ in range(MAX_ENDS)] == [False] * (MAX_ENDS - 1) + [True]
    assert not refusals.count("bob")
    assert (refusals.left_s("ann"), refusals.left_s("bob")) == (REFUSED_S, 0)
    now_s[0] = REFUSED_S - 1
    assert refusals.left_s("ann") == 1
    now_s[0] = REFUSED_S
    assert refusals.left_s("ann") == 0
    # Ends of long ago do not count.
    now_s[0] = WITHIN_S + 1
    assert not refusals.count("ann")


class Workers:
    """A worker that accepts connections and can end."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))

    def reach(self) -> socket.socket:
        return socket.create_connection(self.listening.getsockname()[:2])

    def end(self) -> None:
        """End the connection of the session."""
        self.listening.accept()[0].close()


@pytest.fixture
def worker() -> Iterator[Workers]:
    made = Workers()
    with made.listening:
        yield made


@pytest.fixture
def served(worker: Workers, tmp_path: Path) -> Iterator[Attic]:
    with attic(tmp_path / "attic", worker.reach, ("CUDA0", "CPU")) as machine:
        yield machine


def taken(served: Attic) -> Use:
    """Wait until the listener tells the session that the worker has ended, and return it."""
    deadline_s = time.monotonic() + DEADLINE_S
    while (use := served.listener.take_ended("CUDA0")) is None:
        assert time.monotonic() < deadline_s, "no session was ended"
    return use


def wait_for_end(session: Session) -> None:
    with pytest.raises((BrokenTalkError, OSError)):
        session.receive(1)
    session.close()


def test_a_session_that_the_worker_ended_is_told_once(served: Attic, worker: Workers, tmp_path: Path) -> None:
    laptop = Home(tmp_path / "laptop")
    served.pair(laptop)
    session = served.open(laptop, "CUDA0")
    worker.end()
    wait_for_end(session)
    assert (taken(served).client, served.listener.take_ended("CUDA0")) == ("laptop", None)


def test_a_session_that_the_borrower_ended_is_not_told(served: Attic, worker: Workers, tmp_path: Path) -> None:
    laptop = Home(tmp_path / "laptop")
    served.pair(laptop)
    session = served.open(laptop, "CUDA0")
    session.close()
    connection, _ = worker.listening.accept()
    with connection:
        assert connection.recv(1) == b""
    deadline_s = time.monotonic() + DEADLINE_S
    while served.listener.uses:
        assert time.monotonic() < deadline_s, "the session goes on"
    assert served.listener.take_ended("CUDA0") is None


def test_who_is_refused_is_told_how_long_and_others_go_on(
    served: Attic, worker: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine a session takes longer to end than a second caller usually waits.
    monkeypatch.setattr(listener, "BUSY_S", DEADLINE_S)
    laptop, garden = Home(tmp_path / "laptop"), Home(tmp_path / "garden")
    served.pair(laptop)
    pairing = served.pair(garden, "garden")
    for _ in range(MAX_ENDS):
        session = served.open(laptop, "CUDA0")
        worker.end()
        wait_for_end(session)
        served.listener.refusals.count(taken(served).fingerprint)
    for device in ("CUDA0", "CPU", ""):
        words = (
            "does not run" if not device else r"refuses this computer for 5 min, because models from this computer keep"
        )
        with pytest.raises(TunnelError, match=words):
            served.open(laptop, device)
    told = [offered_devices(served, home, pairing.der) for home in (laptop, garden)]
    assert [all(each > 0 for each in seconds) for seconds in told] == [True, False]
    served.open(garden, "CUDA0").close()


def offered_devices(served: Attic, home: Home, certificate: bytes) -> list[int]:
    """Return for how many seconds each device is refused, by the offer."""
    offer = ask_offer(served.endpoint, certificate, home.identity)
    return [device.refused_s for device in offer.devices]
