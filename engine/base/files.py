"""Reading and writing files: writes are atomic, reads are limited in size and time.

All our files are written through `replacing`: after a full disk, a crash or a kill the old file is still complete. The
module also has file locks, and the folders of the Hugging Face cache, which other programs use too.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from engine.base.errors import ArgumentError
from engine.base.language import tr

READ_TIMEOUT_S = 5.0
"""Time limit in seconds for reading pipes and other files that are not regular, such as `<(...)` of a shell."""
_READ_BYTES = 1 << 16


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file next to `path`, which replaces `path` on exit.

    After an error the temporary file is removed. If `path` is a link, its target is replaced and the link stays.

    Raises:
        OSError: the file cannot be written, or `path` exists and is not a regular file.
        ValueError: `path` is not a valid path.
    """
    # The temporary file is next to the target: a rename is atomic only within one file system.
    target = _resolved(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, tr("the path is a folder; name the file to write"))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, tr("the path is not a regular file"))
    # Not the target's name with more: that may be as long as a name can be.
    unfinished = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        yield unfinished
        # Synced before the rename: after a power failure the name must not lead to a file without its bytes.
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        # Rights that people gave the old file stay.
        if target.exists():
            shutil.copymode(target, unfinished)
        unfinished.replace(target)
        sync_folder(target.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def _resolved(path: Path) -> Path:
    # A loop of links is a RuntimeError until Python 3.13, and resolved to one of the links from there on.
    with suppress(RuntimeError):
        target = path.resolve()
        if not target.is_symlink():
            return target
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to a file atomically: a reader finds the old content or the new one.

    Raises:
        OSError: the file cannot be written, or `path` exists and is not a regular file.
        ValueError: `path` is not a valid path.
    """
    with replacing(path) as unfinished:
        unfinished.write_bytes(data)


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only the user can read. If the file exists already, do nothing. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a hard link cannot cross file systems.
    unfinished = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        # Not written first and closed to others after: they could have opened it in between.
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            # On disk before it gets its name: a power failure must not leave an empty file.
            file.flush()
            os.fsync(file.fileno())
        # Another process may have been quicker: then its file counts.
        try:
            os.link(unfinished, path)
        except FileExistsError:
            pass
        except OSError:
            # FAT, and some network file systems, have no hard links.
            if not path.exists():
                unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_at_most(path: Path, max_bytes: int, *, timeout_s: float = READ_TIMEOUT_S) -> bytes:
    """Return the first `max_bytes` of a file, or the whole file if it is shorter.

    `timeout_s`: time limit for a file that is not regular, such as a pipe.

    Raises:
        OSError: the file cannot be read; `TimeoutError` if a pipe or device does not end within the time limit.
        ValueError: the path is not valid.
    """
    # Without O_NONBLOCK opening a pipe that nobody writes to would wait for ever.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        file = FileIO(descriptor)
    except OSError:
        os.close(descriptor)  # a folder's, which nobody else closes
        raise
    with file:
        limit_s = None if stat.S_ISREG(os.fstat(descriptor).st_mode) else time.monotonic() + timeout_s
        parts: list[bytes] = []
        left = max_bytes
        while left > 0:
            if limit_s is not None and not _is_readable(file, max(0.0, limit_s - time.monotonic())):
                raise TimeoutError(
                    errno.ETIMEDOUT, tr("the input did not end in time; save the input in a file and use that file")
                )
            part = file.read(min(left, _READ_BYTES))
            if not part:
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def _is_readable(file: FileIO, timeout_s: float) -> bool:
    """Wait at most `timeout_s` seconds until `file` has data or has ended; return whether that happened."""
    if sys.platform == "win32":
        return bool(select.select([file], [], [], timeout_s)[0])
    # Not `select`: it takes no descriptors from 1024 on.
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def open_regular(path: Path) -> FileIO:
    """Open a regular file that is not empty, for reading. Opening never blocks.

    Raises:
        OSError: the file cannot be opened, is not regular, or is empty (files of `/proc` report a size of 0).
        ValueError: the path is not valid.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    # Asked of the descriptor: the path may lead to another file by now.
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, tr("the path is not a regular file"))
    if not status.st_size:
        os.close(descriptor)
        raise OSError(errno.EINVAL, tr("the file is empty"))
    return FileIO(descriptor)


def sync_folder(folder: Path) -> None:
    """Sync a folder to the disk, so that a rename in it survives a power failure. On Windows this does nothing."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(descriptor: int, *, wait: bool) -> bool:
    """Lock an open file exclusively; return False if another process holds the lock. Closing the descriptor unlocks it.

    `wait`: block until no other process holds the lock. On Windows, and on a file system without locks, nothing is
    locked, and the result is True.
    """
    if sys.platform == "win32":
        return True
    import fcntl

    # Not `lockf`: its lock would end as soon as this process closes any other descriptor of the file.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise
    return True


def open_lock(path: Path, *, wait: bool) -> int | None:
    """Lock the file `path`, which need not exist, and return the descriptor that holds the lock; close it to unlock.

    None if another process or thread holds the lock and `wait` is False. On Windows nothing is locked.

    Raises:
        OSError: the lock file cannot be opened.
    """
    # A file of its own: a write replaces the file by a rename, and a lock on the old one would keep nobody out.
    descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    is_locked = False
    try:
        is_locked = lock_file(descriptor, wait=wait)
    finally:
        if not is_locked:
            os.close(descriptor)
    return descriptor if is_locked else None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock on the file `path` while the block runs; wait until no other process or thread holds it.

    `path` need not exist, but its folder must. On Windows nothing is locked.

    Raises:
        OSError: the lock file cannot be opened.
    """
    descriptor = open_lock(path, wait=True)
    assert descriptor is not None
    try:
        yield
    finally:
        os.close(descriptor)


def hugging_face_home(environment: Mapping[str, str], home: Path | None = None) -> Path:
    """Return the folder of the Hugging Face tools (`HF_HOME`).

    `environment`: environment variables. `HF_HOME` is used, else `XDG_CACHE_HOME`, as huggingface_hub does.
    `home`: the user's home folder; None: ask the system.
    """
    named = _named_folder(environment, "HF_HOME", home)
    cache = _named_folder(environment, "XDG_CACHE_HOME", home)
    return named or (cache or (home or Path.home()) / ".cache") / "huggingface"


def hugging_face_cache(environment: Mapping[str, str], home: Path | None = None) -> Path:
    """Return the Hugging Face cache, in which the Hugging Face tools and llama.cpp store models."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if named := _named_folder(environment, name, home):
            return named
    return hugging_face_home(environment, home) / "hub"


def _named_folder(environment: Mapping[str, str], name: str, home: Path | None) -> Path | None:
    text = environment.get(name, "")
    if not text or "\0" in text:
        return None
    if home and text.startswith("~/"):
        return home / text[2:]
    # As huggingface_hub does: a name of an unknown user stays in the path, where `Path.expanduser` would raise.
    return Path(os.path.expanduser(text)).absolute()  # noqa: PTH111


def require_hugging_face_cache(environment: Mapping[str, str]) -> Path:
    """Return the Hugging Face cache, for a caller that writes to it.

    Raises:
        ArgumentError: the environment variable that names the folder begins with `~NAME`, but no user is called NAME.
    """
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        if not (text := environment.get(name, "")):
            continue
        if os.path.expanduser(text).startswith("~"):  # noqa: PTH111
            raise ArgumentError(
                tr(
                    "The environment variable {name} names a folder of an unknown user: {text}. Correct or unset it.",
                    name=name,
                    text=text,
                )
            )
        break
    return hugging_face_cache(environment)
