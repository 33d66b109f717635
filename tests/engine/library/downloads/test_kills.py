"""Downloads killed at random moments: the continued file has the right hash, and at most one block is fetched twice."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from engine.library.downloads.part_file import count_bytes, read_journal
from engine.runtime.protocol.network import DownloadProgress
from tests.support.hub_server import Fault, HubServer, Repo, hub_server, sha256
from tests.support.transfers import KIB, Running, download_of, fetch, hub_file, some_bytes

DATA = some_bytes(1024 * KIB)
BLOCK = 64 * KIB
PAGE = 512


def _kill_after(server: HubServer, running: Running, limit: int) -> None:
    sent = 0

    def look(answered: int) -> None:
        nonlocal sent
        sent += 16 * KIB if answered else 0
        if sent >= limit and running.transfer.pid is not None:
            server.at_bytes = None
            os.kill(running.transfer.pid, signal.SIGKILL)

    server.at_bytes = look


def _written(part: Path) -> int:
    """Return how many bytes of the part file are those of the whole one."""
    data = part.read_bytes() if part.exists() else b""
    return sum(
        PAGE
        for at in range(0, len(data), PAGE)
        if data[at : at + PAGE] == DATA[at : at + PAGE] and len(data) - at >= PAGE
    )


def _check_one(server: HubServer, folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    connections = chance.choice([1, 3])
    download = download_of(hub_file(server, "org/m", "m.gguf", folder), connections=connections, block_bytes=BLOCK)
    target = folder / "m.gguf"
    here = 0
    for n_kills in range(1, chance.choice([2, 2, 3])):
        server.sent.clear()
        running = Running(download)
        _kill_after(server, running, chance.randrange(len(DATA)))
        end = running.end()
        server.at_bytes = None
        if end.succeeded:
            break
        assert end.kind == "crashed", end
        kept = read_journal(folder / "m.gguf.part.json")
        here = 0 if kept is None else count_bytes(kept[1])
        assert _written(folder / "m.gguf.part") - here <= n_kills * (BLOCK + PAGE * connections)
    server.sent.clear()
    last = fetch(download)
    assert [file.sha256 for file in last.files] == [sha256(DATA)], (seed, last)
    assert target.read_bytes() == DATA
    if not end.succeeded:
        assert last.fetched_bytes == len(DATA) - here, seed
    assert sorted(path.name for path in folder.iterdir()) == ["m.gguf"]


def test_what_was_reported_stays_however_little_it_is(tmp_path: Path) -> None:
    def kill(progress: DownloadProgress) -> None:
        if progress.done_bytes and running.transfer.pid is not None:
            reported.append(progress.done_bytes)
            os.kill(running.transfer.pid, signal.SIGKILL)

    reported: list[int] = []
    with hub_server(Repo("org/m", {"m.gguf": DATA})) as server:
        server.faults.append(Fault("stall", 100 * KIB))
        download = download_of(hub_file(server, "org/m", "m.gguf", tmp_path), block_bytes=8 << 20)
        running = Running(download, kill)
        assert running.end().kind == "crashed"
        kept = read_journal(tmp_path / "m.gguf.part.json")
        assert kept is not None
        assert count_bytes(kept[1]) >= reported[0] > 0
        assert fetch(download).fetched_bytes <= len(DATA) - reported[0]


def _check(tmp_path: Path, seeds: range) -> None:
    with hub_server(Repo("org/m", {"m.gguf": DATA})) as server:
        for seed in seeds:
            folder = tmp_path / str(seed)
            folder.mkdir()
            _check_one(server, folder, seed)


def test_a_dozen_killed_transfers(tmp_path: Path) -> None:
    _check(tmp_path, range(12))


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(1000, 1200, 20))
def test_two_hundred_killed_transfers(tmp_path: Path, first: int) -> None:
    _check(tmp_path, range(first, first + 20))
