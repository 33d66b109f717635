"""Signs of work of a child: which count, and ticks that are sent only with them."""

from __future__ import annotations

import math
import queue
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from engine.runtime.protocol import heartbeat
from engine.runtime.protocol.heartbeat import (
    CPU_SECONDS,
    MEMORY_BYTES,
    NETWORK_BYTES,
    READ_BYTES,
    ResourceUse,
    WorkHeartbeat,
    current_use,
)
from tests.support.patience import DEADLINE_S

BEFORE = ResourceUse(10.0, 1 << 30, 5000, 5000)


def test_use_grows_with_work_only() -> None:
    small = ResourceUse(
        10.0 + CPU_SECONDS / 2, (1 << 30) + MEMORY_BYTES // 2, 5000 + READ_BYTES // 2, 5000 + NETWORK_BYTES // 2
    )
    assert not small.shows_work_since(BEFORE)


@pytest.mark.parametrize(
    "now",
    [
        ResourceUse(10.0 + 2 * CPU_SECONDS, 1 << 30, 5000, 5000),
        ResourceUse(10.0, (1 << 30) + MEMORY_BYTES, 5000, 5000),
        ResourceUse(10.0, 1 << 30, 5000 + READ_BYTES, 5000),
        ResourceUse(10.0, 1 << 30, 5000, 5000 + NETWORK_BYTES),
    ],
)
def test_each_kind_of_work_counts(now: ResourceUse) -> None:
    assert now.shows_work_since(BEFORE)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a connection's bytes")
def test_what_a_server_takes_from_us_is_work() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0] as theirs,
    ):
        before = current_use()
        ours.sendall(bytes(NETWORK_BYTES))
        theirs.recv(NETWORK_BYTES, socket.MSG_WAITALL)
        assert current_use().network_bytes - before.network_bytes >= NETWORK_BYTES


def test_ticks_come_with_work() -> None:
    ticks: queue.SimpleQueue[None] = queue.SimpleQueue()
    with WorkHeartbeat(lambda: ticks.put(None), tick_seconds=0.25):
        deadline = time.monotonic() + DEADLINE_S
        while ticks.empty() and time.monotonic() < deadline:
            math.factorial(2000)
        assert not ticks.empty()


def test_no_ticks_without_work(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = threading.Semaphore(0)

    def idle(*, with_network: bool) -> ResourceUse:
        looks.release()
        return BEFORE

    monkeypatch.setattr(heartbeat, "current_use", idle)
    ticks: list[None] = []
    with WorkHeartbeat(lambda: ticks.append(None), tick_seconds=0.01):
        for _ in range(5):
            assert looks.acquire(timeout=DEADLINE_S)
    assert ticks == []


def test_ticks_come_without_work_while_others_may_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """An RPC worker sends nothing while it computes a batch."""
    monkeypatch.setattr(heartbeat, "current_use", lambda **_: BEFORE)
    monkeypatch.setattr(heartbeat, "_network_bytes", lambda: 0)
    ticks: queue.SimpleQueue[None] = queue.SimpleQueue()
    with WorkHeartbeat(lambda: ticks.put(None), tick_seconds=0.01, may_wait=lambda: True):
        ticks.get(timeout=DEADLINE_S)


def test_connections_are_looked_at_only_where_nothing_else_shows_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look walks all descriptors, and an answer uses the processor anyway."""
    cpu_s, n_bytes, looks = iter(range(1000)), iter(range(0, 1 << 30, NETWORK_BYTES)), queue.SimpleQueue[str]()

    def use(*, with_network: bool, busy: bool) -> ResourceUse:
        assert not with_network
        looks.put("use")
        return ResourceUse(next(cpu_s) if busy else 0, 0, 0, 0)

    def network() -> int:
        looks.put("network")
        return next(n_bytes)

    monkeypatch.setattr(heartbeat, "_network_bytes", network)
    for busy, expected in ((True, {"use"}), (False, {"use", "network"})):
        ticks: queue.SimpleQueue[None] = queue.SimpleQueue()
        monkeypatch.setattr(heartbeat, "current_use", partial(use, busy=busy))
        with WorkHeartbeat(lambda ticks=ticks: ticks.put(None), tick_seconds=0.01):  # type: ignore[misc]
            for _ in range(3):
                ticks.get(timeout=DEADLINE_S)
        seen = set()
        while not looks.empty():
            seen.add(looks.get())
        assert seen == expected


def test_a_process_without_descriptors_left_still_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_path: Path) -> list[Path]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "iterdir", fail)
    assert current_use().network_bytes == 0
