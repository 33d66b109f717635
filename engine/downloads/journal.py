"""What is known of an unfinished file: where it comes from and which of its bytes are here.

A line for the origin, then a line for every step; the last whole line counts. Steps are written after their bytes were,
which is enough for a process that is killed. A machine that loses power may keep the step and lose the bytes: steps are
marked once the bytes were forced to the disk, and after a restart of the machine only those count.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from engine.downloads.ranges import Ranges, merge
from engine.files import read_at_most, write_whole

VERSION = 1
MAX_BYTES = 64 * 1024 * 1024
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Which file it is. `etag` and `sha256` as the server named them, None where it did not."""

    url: str
    commit: str = ""
    etag: str | None = None
    sha256: str | None = None
    size_bytes: int | None = None
    version: int = VERSION


class _Step(msgspec.Struct, frozen=True):
    done: tuple[tuple[int, int], ...]
    synced: bool = False
    boot: str = ""


class Journal:
    """The journal of one unfinished file, open for further steps. Not for several threads at once."""

    def __init__(self, path: Path, origin: Origin, done: Ranges) -> None:
        self._path = path
        self._boot = _boot_id()
        lines = [origin, _Step(done, synced=not done, boot=self._boot)]
        write_whole(path, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))

    def note(self, done: Ranges, *, synced: bool = False) -> None:
        """Write a step; `synced`: the bytes of it are on the disk, and so shall the step be."""
        os.write(self._descriptor, msgspec.json.encode(_Step(done, synced, self._boot)) + b"\n")
        if synced:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; it stays."""
        os.close(self._descriptor)


def read_journal(path: Path) -> tuple[Origin, Ranges] | None:
    """Return what a journal says, None where there is none that can be read."""
    try:
        lines = read_at_most(path, MAX_BYTES).split(b"\n")
        origin = msgspec.json.decode(lines[0], type=Origin)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
    if origin.version != VERSION:
        return None
    boot = _boot_id()
    for line in reversed(lines[1:]):
        try:
            step = msgspec.json.decode(line, type=_Step)
        except (msgspec.MsgspecError, ValueError):
            continue  # Cut off when the process was killed.
        if step.synced or (boot and step.boot == boot):
            return origin, merge(step.done, origin.size_bytes)
    return origin, ()


def _boot_id() -> str:
    """Return what is another text after each start of the machine, "" where nothing tells."""
    try:
        return read_at_most(_BOOT_ID, 64).decode("ascii").strip()
    except (OSError, ValueError):
        return ""
