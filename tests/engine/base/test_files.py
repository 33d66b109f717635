"""Files are written completely or not at all; reading is bounded."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.base.files import locked, read_at_most, replacing, write_private, write_whole

if sys.platform != "win32":
    import resource  # Windows has none.
from tests.support.descriptors import many_files
from tests.support.patience import DEADLINE_S

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pipes, links and limits here are those of POSIX")


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Let writes fail past `size_bytes`, as they do on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_new_file_is_written(tmp_path: Path) -> None:
    write_whole(tmp_path / "rig.json", b"new")
    assert (tmp_path / "rig.json").read_bytes() == b"new"


def test_an_existing_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "rig.json"
    path.write_bytes(b"old")
    path.chmod(0o640)
    write_whole(path, b"new")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o640)


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rig.json"
    path.write_bytes(b"old")
    with files_of_at_most(1000), pytest.raises(OSError, match="File too large"):
        write_whole(path, bytes(4000))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_of_the_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "demo.gguf"
    path.write_bytes(b"old")

    def write_half() -> None:
        with replacing(path) as unfinished:
            unfinished.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_link_points_to_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    link, target = tmp_path / "link.json", tmp_path / "kept" / "real.json"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "loop"
    link.symlink_to(link)
    with pytest.raises((OSError, RuntimeError)):
        write_whole(link, b"new")
    assert link.is_symlink()


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        write_whole(pipe, b"new")
    assert pipe.is_fifo()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
def test_a_link_to_a_device_leaves_both(tmp_path: Path) -> None:
    link = tmp_path / "device"
    link.symlink_to("/dev/full")
    with pytest.raises(OSError, match="not a regular file"):
        write_whole(link, b"new")
    assert Path("/dev/full").is_char_device()


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, b"new")


def test_a_file_is_read_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "rig.json"
    path.write_bytes(bytes(300_000))
    assert len(read_at_most(path, 1 << 20)) == 300_000
    assert len(read_at_most(path, 100_000)) == 100_000


def test_a_pipe_that_nobody_writes_to_runs_into_the_limit(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(TimeoutError, match="the input did not end in time"):
        read_at_most(pipe, 100, timeout_s=0.1)


def test_a_pipe_that_is_written_to_is_read_to_its_end() -> None:
    reader, writer = os.pipe()

    def write() -> None:
        with os.fdopen(writer, "wb") as file:
            file.write(b"whole")

    thread = threading.Thread(target=write)
    thread.start()
    assert read_at_most(Path(f"/dev/fd/{reader}"), 100) == b"whole"
    thread.join()
    os.close(reader)


def test_a_pipe_that_stays_open_runs_into_the_limit(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    keeps_open = os.open(pipe, os.O_RDWR)
    with pytest.raises(TimeoutError, match="the input did not end in time"):
        read_at_most(pipe, 100, timeout_s=0.1)
    os.close(keeps_open)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="/dev/zero is a device of Linux")
def test_a_device_without_an_end_is_read_to_the_limit() -> None:
    assert len(read_at_most(Path("/dev/zero"), 5000)) == 5000


def test_a_pipe_is_read_with_many_files_open(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writing = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    os.write(writing, b"said")
    with many_files():
        assert read_at_most(pipe, 4, timeout_s=DEADLINE_S) == b"said"
    os.close(writing)


def test_a_private_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            write_private(tmp_path / "folder" / "key", b"secret")
    assert list((tmp_path / "folder").iterdir()) == []
    write_private(tmp_path / "folder" / "key", b"secret")
    write_private(tmp_path / "folder" / "key", b"another")
    assert (tmp_path / "folder" / "key").read_bytes() == b"secret", "the first one counts"
    assert os.name == "nt" or (tmp_path / "folder" / "key").stat().st_mode & 0o777 == 0o600


def test_a_private_file_is_written_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    write_private(tmp_path / "key", b"secret")
    write_private(tmp_path / "key", b"another")
    assert [entry.read_bytes() for entry in tmp_path.iterdir()] == [b"secret"]


def test_a_file_system_without_locks_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "a.json"), locked(tmp_path / "a.json"):
        pass
