"""Bytes through both ends of a tunnel: complete, in both directions at once, until one side closes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.machines.tunnel.identity import read_identity
from engine.machines.tunnel.streams import (
    BUFFER_BYTES,
    Stream,
    calling_context,
    plain_stream,
    relay,
    serving_context,
    tls_stream,
)
from tests.support.patience import DEADLINE_S

N_BYTES = 8 * BUFFER_BYTES + 12345


class Line:
    """A tunnel from `near` to `far`; both of its ends run in the event loop of one thread."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.identity = read_identity(folder / "identity.pem")
        self.near, near_end = (stack.enter_context(each) for each in socket.socketpair())
        self.far, far_end = (stack.enter_context(each) for each in socket.socketpair())
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run(near_end, far_end)))
        self.thread.start()
        for each in (self.near, self.far):
            each.settimeout(DEADLINE_S)

    async def _run(self, near_end: socket.socket, far_end: socket.socket) -> None:
        inner, outer = socket.socketpair()
        serving, calling = await asyncio.gather(
            tls_stream(outer, serving_context(self.identity, None), server_side=True),
            tls_stream(inner, calling_context(self.identity, self.identity.certificate)),
        )
        await asyncio.gather(self._pass(calling, near_end), self._pass(serving, far_end))

    async def _pass(self, tls: Stream, end: socket.socket) -> None:
        await relay(tls, await plain_stream(end))

    def join(self) -> None:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    with ExitStack() as stack:
        made = Line(tmp_path, stack)
        yield made
        made.near.close()
        made.join()


def received(source: socket.socket, n_bytes: int) -> str:
    digest = hashlib.sha256()
    while n_bytes:
        part = source.recv(min(n_bytes, 1 << 18))
        assert part
        digest.update(part)
        n_bytes -= len(part)
    return digest.hexdigest()


def test_much_goes_both_ways_at_once(line: Line) -> None:
    there, back = os.urandom(N_BYTES), os.urandom(N_BYTES)
    sending = [
        threading.Thread(target=line.near.sendall, args=(there,)),
        threading.Thread(target=line.far.sendall, args=(back,)),
    ]
    for thread in sending:
        thread.start()
    found: dict[str, str] = {}
    reading = [
        threading.Thread(target=lambda: found.update(far=received(line.far, N_BYTES))),
        threading.Thread(target=lambda: found.update(near=received(line.near, N_BYTES))),
    ]
    for thread in reading:
        thread.start()
    for thread in (*sending, *reading):
        thread.join(DEADLINE_S)
    assert found == {"far": hashlib.sha256(there).hexdigest(), "near": hashlib.sha256(back).hexdigest()}


def test_who_does_not_read_holds_up_who_writes_and_nothing_grows(line: Line) -> None:
    line.near.setblocking(False)
    taken = 0
    waiting = bytes(1 << 16)
    quiet = 0
    while quiet < 50:
        try:
            taken += line.near.send(waiting)
            quiet = 0
        except BlockingIOError:
            quiet += 1
            threading.Event().wait(0.01)
    # Buffers of ours and of the system, however long it writes.
    assert taken < 64 << 20
    line.near.settimeout(DEADLINE_S)
    assert received(line.far, taken) == hashlib.sha256(bytes(taken)).hexdigest()


def test_what_was_said_before_the_end_arrives(line: Line) -> None:
    line.near.sendall(b"the last words")
    line.near.close()
    assert line.far.recv(100) == b"the last words"
    assert line.far.recv(100) == b""
    line.join()


def test_a_session_that_is_cancelled_twice_leaves_no_open_connection() -> None:
    """A pairing is deleted and the listener ends, at once or some steps of the loop later."""

    async def run(steps: int) -> list[int]:
        pairs = [socket.socketpair() for _ in range(2)]
        streams = [await plain_stream(near) for near, _ in pairs]
        session = asyncio.create_task(relay(*streams))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        session.cancel()
        for _ in range(steps):
            await asyncio.sleep(0)
        session.cancel()
        await asyncio.wait([session])
        await asyncio.sleep(0)
        for _, far in pairs:
            far.close()
        return [near.fileno() for near, _ in pairs]

    found = [asyncio.run(asyncio.wait_for(run(steps), DEADLINE_S)) for steps in range(6)]
    assert found == [[-1, -1]] * 6


def test_the_other_end_sees_a_worker_that_is_gone(line: Line) -> None:
    line.far.close()
    assert line.near.recv(100) == b""
    line.join()
