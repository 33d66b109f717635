"""The folder of weights that a worker keeps: complete files, eviction, and files that must not be touched."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from engine.base.errors import EngineError
from engine.base.weight_cache import WeightCacheTrimmer, cached_files, empty, kept_bytes
from tests.support.patience import DEADLINE_S


def write(folder: Path, number: int, size_bytes: int, used_s: float | None = None) -> Path:
    """Write a file as the engine names it, last used at `used_s`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{number:016x}"
    path.write_bytes(b"w" * size_bytes)
    if used_s is not None:
        os.utime(path, (used_s, used_s))
    return path


def keeper(folder: Path, quota_bytes: int = 1000, *, reserve_bytes: int = 0) -> WeightCacheTrimmer:
    found = WeightCacheTrimmer(folder, quota_bytes, reserve_bytes)
    found.begin()
    return found


def test_what_was_there_in_two_looks_is_there_after_a_restart(tmp_path: Path) -> None:
    first = keeper(tmp_path)
    whole = write(tmp_path, 1, 100)
    first.look()
    first.look()
    late = write(tmp_path, 2, 100)
    first.look()
    keeper(tmp_path)
    assert whole.exists()
    assert not late.exists(), "the worker may have ended in the middle of writing it"


def test_what_still_grows_is_not_whole(tmp_path: Path) -> None:
    first = keeper(tmp_path)
    for size in (10, 20, 30):
        path = write(tmp_path, 1, size)
        first.look()
    keeper(tmp_path)
    assert not path.exists()


def test_what_has_another_size_than_it_had_goes(tmp_path: Path) -> None:
    first = keeper(tmp_path)
    path = write(tmp_path, 1, 100)
    first.look()
    first.look()
    path.write_bytes(b"w" * 60)
    keeper(tmp_path)
    assert not path.exists()


def test_what_was_used_least_lately_goes_first(tmp_path: Path) -> None:
    files = [write(tmp_path, number, 400, used_s=1000.0 + number) for number in (3, 1, 2)]
    found = WeightCacheTrimmer(tmp_path, 1000, 0)
    found.look()
    assert [path.exists() for path in files] == [True, False, True]
    assert kept_bytes(tmp_path) == 800


def test_a_load_larger_than_the_quota_finds_what_had_room(tmp_path: Path) -> None:
    """A load asks for its files once, in the same order: of the least recently used ones it would find none."""
    now_s = 1000.0
    old = write(tmp_path, 99, 400, used_s=now_s - 100.0)
    found = WeightCacheTrimmer(tmp_path, 1000, 0, clock=lambda: now_s)

    def load(client: str, numbers: range) -> int:
        """Ask for these files; store those that are not there. Return how many were there."""
        nonlocal now_s
        hits = 0
        for number in numbers:
            now_s += 5.0
            path = tmp_path / f"{number:016x}"
            if path.exists():
                hits += 1
                os.utime(path, (now_s, path.stat().st_mtime))
            else:
                write(tmp_path, number, 250, used_s=now_s)
            now_s += 1.0
            found.look(client)
        return hits

    found.look()
    assert [load("first", range(10)), load("second", range(10)), load("third", range(10))] == [0, 4, 4]
    assert not old.exists(), "what another client has stored goes first"
    assert [load("fourth", range(20, 23)), load("fifth", range(20, 23))] == [0, 3], "another model"


@pytest.mark.skipif(not hasattr(os, "ST_NOATIME"), reason="only Linux tells whether reads are recorded")
def test_reads_of_each_client_are_recorded(tmp_path: Path) -> None:
    """With the mount option `relatime` a second read on the same day is not recorded."""
    if os.statvfs(tmp_path).f_flag & os.ST_NOATIME:
        pytest.skip("the file system records no reads")
    found = keeper(tmp_path)
    path = write(tmp_path, 1, 100)
    for client in ("first", "second"):
        before_s = cached_files(tmp_path)[0].used_s
        found.look(client)
        deadline_s = time.monotonic() + DEADLINE_S
        # The clock of the file system has ticks of some milliseconds.
        while (state := path.stat()).st_atime <= max(state.st_ctime, before_s):
            assert time.monotonic() < deadline_s
            path.read_bytes()
        assert cached_files(tmp_path)[0].used_s > before_s


def test_a_full_disk_leaves_nothing_that_may_be_cut_off(tmp_path: Path) -> None:
    path = write(tmp_path, 1, 100)
    found = WeightCacheTrimmer(tmp_path, 1000, reserve_bytes=1 << 62)
    found.look()
    assert not path.exists()


def test_only_what_the_engine_wrote_is_touched(tmp_path: Path) -> None:
    other = tmp_path / "letter.txt"
    other.write_text("mine")
    precious = tmp_path / "outside"
    precious.write_text("mine")
    folder = tmp_path / "weights"
    write(folder / "50052", 1, 500)
    (folder / "50052" / f"{2:016x}").symlink_to(precious)
    (folder / "50052" / f"{3:016x}").mkdir()
    (folder / "50052" / "notes").write_text("mine")
    assert [file.path.name for file in cached_files(folder)] == [f"{1:016x}"]
    assert empty(folder) == 500
    assert kept_bytes(folder) == 0
    assert precious.read_text() == other.read_text() == "mine"
    assert (folder / "50052" / "notes").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"0000000000000001": "x"}', "{"])
def test_a_damaged_list_counts_for_nothing(text: str, tmp_path: Path) -> None:
    path = write(tmp_path, 1, 100)
    (tmp_path / "whole.json").write_text(text)
    keeper(tmp_path)
    assert not path.exists()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="cannot be cached"):
        keeper(tmp_path / "file" / "weights")
    assert cached_files(tmp_path / "nowhere") == ()
