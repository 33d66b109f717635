"""The unfinished file of a download: continued by the next process, after a kill or a power loss."""

from __future__ import annotations

import errno
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.files import lock_file
from engine.library.downloads.part_file import (
    ChangedError,
    OccupiedError,
    Origin,
    PartFile,
    Ranges,
    StorageError,
    add_range,
    bytes_here,
    count_bytes,
    discard_part,
    first_gap,
    merge,
    prefix_end,
    read_journal,
)

SIZE = 40
PAIRS = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=12)


@given(PAIRS)
def test_ranges_are_the_bytes_that_were_added(pairs: list[tuple[int, int]]) -> None:
    ranges: Ranges = ()
    here: set[int] = set()
    for first, end in pairs:
        ranges = add_range(ranges, first, end)
        here.update(range(first, end))
    assert {at for first, end in ranges for at in range(first, end)} == here
    assert count_bytes(ranges) == len(here)
    assert all(one[1] < two[0] for one, two in pairwise(ranges)), "none touch"
    missing = [at for at in range(SIZE) if at not in here]
    gap = first_gap(ranges, SIZE)
    assert (gap is None) == (not missing)
    assert prefix_end(ranges) == next(at for at in range(SIZE + 1) if at not in here)
    if gap is not None:
        assert gap[0] == missing[0]
        assert set(range(*gap)).isdisjoint(here)


@given(st.lists(st.tuples(st.integers(-5, SIZE + 9), st.integers(-5, SIZE + 9)), max_size=12))
def test_a_damaged_journal_gives_ranges_inside_of_the_file(pairs: list[tuple[int, int]]) -> None:
    assert all(0 <= first < end <= SIZE for first, end in merge(pairs, SIZE))


ORIGIN = Origin(url="https://files.example/m.gguf", etag="one", sha256="a" * 64, size_bytes=100)
BLOCK = 10


def _open(target: Path, origin: Origin = ORIGIN, *, restart: bool = False) -> PartFile:
    return PartFile(target, origin, block_bytes=BLOCK, restart=restart)


def _journal(target: Path) -> Path:
    return target.with_name(target.name + ".part.json")


def _abandon(part: PartFile) -> None:
    """Leave a part file as a process does that is killed: nothing more is noted."""
    part._journal.close()
    os.close(part._descriptor)


def test_what_is_here_is_taken_up(tmp_path: Path) -> None:
    part = _open(tmp_path / "m.gguf")
    part.write(0, b"x" * 25)
    part.write(50, b"y" * 5)
    part.close()
    again = _open(tmp_path / "m.gguf")
    assert again.done == ((0, 25), (50, 55))
    assert bytes_here(tmp_path / "m.gguf", 100) == 30
    again.write(25, b"z" * 25)
    again.write(55, b"z" * 45)
    again.finish()
    assert (tmp_path / "m.gguf").read_bytes() == b"x" * 25 + b"z" * 25 + b"y" * 5 + b"z" * 45
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_kill_costs_a_block_at_most(tmp_path: Path) -> None:
    part = _open(tmp_path / "m.gguf")
    for at in range(37):
        part.write(at, b"x")
    _abandon(part)
    kept = read_journal(_journal(tmp_path / "m.gguf"))
    assert kept is not None
    assert kept[1] == ((0, 30),)


def test_a_kill_costs_nothing_that_was_noted(tmp_path: Path) -> None:
    part = _open(tmp_path / "m.gguf")
    part.write(0, b"x" * 3)
    part.note()
    lines = _journal(tmp_path / "m.gguf").read_bytes()
    part.note()
    assert _journal(tmp_path / "m.gguf").read_bytes() == lines, "without new bytes no line is written"
    _abandon(part)
    assert _done(_journal(tmp_path / "m.gguf")) == ((0, 3),)


def test_a_long_journal_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.library.downloads.part_file.LONGEST_BYTES", 1000)
    part = _open(tmp_path / "m.gguf")
    part.write(0, b"x")
    part.sync()
    for at in range(1, 80):
        part.write(at, b"x")
        part.note()
        assert _done(_journal(tmp_path / "m.gguf")) == ((0, at + 1),)
        assert _journal(tmp_path / "m.gguf").stat().st_size <= 1000
    _abandon(part)
    monkeypatch.setattr("engine.library.downloads.part_file._boot_id", lambda: "another start of the machine")
    assert _done(_journal(tmp_path / "m.gguf")) == ((0, 1),), "what was synced"


def test_a_journal_that_was_cut_off_counts_up_to_its_last_whole_line(tmp_path: Path) -> None:
    part = _open(tmp_path / "m.gguf")
    for at in (0, 10, 20):
        part.write(at, b"x" * 10)
    _abandon(part)
    journal = _journal(tmp_path / "m.gguf")
    for cut, done in ((3, ((0, 10),)), (0, ((0, 20),))):
        data = journal.read_bytes()
        journal.write_bytes(data[: len(data) - cut])
        assert _done(journal) == done
        journal.write_bytes(data)


def _done(journal: Path) -> Ranges:
    kept = read_journal(journal)
    assert kept is not None
    return kept[1]


def test_after_a_loss_of_power_only_what_was_forced_to_the_disk_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = _open(tmp_path / "m.gguf")
    part.write(0, b"x" * 20)
    part.sync()
    part.write(20, b"x" * 10)
    part.write(30, b"x" * 10)
    _abandon(part)
    assert _done(_journal(tmp_path / "m.gguf")) == ((0, 30),)
    monkeypatch.setattr("engine.library.downloads.part_file._boot_id", lambda: "another start of the machine")
    assert _done(_journal(tmp_path / "m.gguf")) == ((0, 20),)


def test_synced_bytes_survive_a_loss_of_power_in_the_next_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = _open(tmp_path / "m.gguf")
    part.write(0, b"x" * 20)
    part.close()
    again = _open(tmp_path / "m.gguf")
    again.learn(ORIGIN)
    again.write(20, b"x" * 10)
    again.write(30, b"x" * 10)
    _abandon(again)
    assert _done(_journal(tmp_path / "m.gguf")) == ((0, 30),)
    monkeypatch.setattr("engine.library.downloads.part_file._boot_id", lambda: "another start of the machine")
    assert _done(_journal(tmp_path / "m.gguf")) == ((0, 20),)


@pytest.mark.parametrize("journal", [b"", b"{", b"[]\n", b'{"url":"x","version":9}\n', bytes(100)])
def test_without_a_journal_it_begins_anew(tmp_path: Path, journal: bytes) -> None:
    (tmp_path / "m.gguf.part").write_bytes(b"x" * 50)
    _journal(tmp_path / "m.gguf").write_bytes(journal)
    part = _open(tmp_path / "m.gguf")
    assert part.done == ()
    part.close()


def test_a_part_that_is_shorter_than_its_journal_says(tmp_path: Path) -> None:
    part = _open(tmp_path / "m.gguf")
    part.write(0, b"x" * 40)
    part.close()
    os.truncate(part.path, 15)
    again = _open(tmp_path / "m.gguf")
    assert again.done == ((0, 15),)
    again.close()


def test_another_file_asks_before_anything_is_thrown_away(tmp_path: Path) -> None:
    part = _open(tmp_path / "m.gguf")
    part.write(0, b"x" * 40)
    part.close()
    other = Origin(url=ORIGIN.url, etag="two", sha256="b" * 64, size_bytes=100)
    with pytest.raises(ChangedError, match="start the download over"):
        _open(tmp_path / "m.gguf", other)
    assert _done(_journal(tmp_path / "m.gguf")) == ((0, 40),)
    again = _open(tmp_path / "m.gguf", other, restart=True)
    assert again.done == ()
    again.close()


def test_the_same_file_of_another_commit_goes_on(tmp_path: Path) -> None:
    part = _open(tmp_path / "m.gguf")
    part.write(0, b"x" * 40)
    part.close()
    again = _open(
        tmp_path / "m.gguf", Origin(url="https://files.example/later/m.gguf", sha256="a" * 64, size_bytes=100)
    )
    assert (again.done, again.origin.etag) == (((0, 40),), "one")
    again.close()


def test_two_do_not_write_one_file(tmp_path: Path) -> None:
    part = _open(tmp_path / "m.gguf")
    with pytest.raises(OccupiedError, match="another program"):
        _open(tmp_path / "m.gguf")
    part.close()


def test_what_another_process_downloads_is_not_discarded(tmp_path: Path) -> None:
    part = _open(tmp_path / "m.gguf")
    part.write(0, b"x" * 40)
    with pytest.raises(OccupiedError, match="another program"):
        discard_part(tmp_path / "m.gguf")
    part.close()
    assert _done(_journal(tmp_path / "m.gguf")) == ((0, 40),)
    discard_part(tmp_path / "m.gguf")
    discard_part(tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "other").write_bytes(b"kept")
    (tmp_path / "m.gguf.part").symlink_to(tmp_path / "other")
    discard_part(tmp_path / "m.gguf")
    assert [each.name for each in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("ends_before_rename", [True, False])
def test_a_file_that_another_process_finishes_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_before_rename: bool
) -> None:
    part = _open(tmp_path / "m.gguf")
    part.write(0, b"x" * 100)
    rename = Path.rename

    def begin() -> None:
        with pytest.raises(OccupiedError, match="another program"):
            _open(tmp_path / "m.gguf")

    def rename_later(path: Path, target: Path) -> Path:
        begin()
        return rename(path, target)

    def finish_before(descriptor: int, *, wait: bool) -> bool:
        monkeypatch.undo()
        part.finish()
        return lock_file(descriptor, wait=wait)

    if ends_before_rename:
        # The second process has opened the unfinished file when the first one renames it.
        monkeypatch.setattr("engine.library.downloads.part_file.lock_file", finish_before)
        begin()
    else:
        monkeypatch.setattr(Path, "rename", rename_later)
        part.finish()
    assert (tmp_path / "m.gguf").read_bytes() == b"x" * 100
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    part = _open(tmp_path / "m.gguf")
    part.write(0, b"x" * 100)
    (tmp_path / "m.gguf").write_bytes(b"mine")
    with pytest.raises(OccupiedError):
        part.finish()
    assert (tmp_path / "m.gguf").read_bytes() == b"mine"


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "m.gguf.part").symlink_to(tmp_path / "mine")
    with pytest.raises(StorageError):
        _open(tmp_path / "m.gguf")
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = _open(tmp_path / "m.gguf")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="full"):
        part.write(0, b"x")
    monkeypatch.undo()
    assert part.done == ()
    part.close()


def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = _open(tmp_path / "m.gguf")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("engine.library.downloads.part_file.write_whole", full)
    with pytest.raises(StorageError, match="full"):
        part.learn(Origin(url=ORIGIN.url, etag="two"))
    part.write(0, b"x" * 8)
    part.close()
    assert read_journal(_journal(tmp_path / "m.gguf")) == (ORIGIN, ((0, 8),))


def test_a_connection_that_comes_to_life_after_the_end_writes_nothing(tmp_path: Path) -> None:
    part = _open(tmp_path / "m.gguf")
    part.write(0, b"x" * 8)
    part.close()
    part.write(8, b"y" * 8)
    part.learn(Origin(url="https://files.example/other.gguf"))
    again = _open(tmp_path / "m.gguf")
    assert again.done == ((0, 8),)
    again.close()
