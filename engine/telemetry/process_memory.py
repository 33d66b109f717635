"""What a process holds of the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

_ANONYMOUS_FIELDS = ("RssAnon", "RssShmem")


def resident_bytes(pid: int) -> int | None:
    """Return the memory that belongs to the process alone, without mapped files where the system tells them apart.

    None when there is no such process, or when it may not be read.
    """
    fields = _status_fields(pid)
    if "RssAnon" in fields:
        return sum(fields.get(name, 0) for name in _ANONYMOUS_FIELDS)
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except (psutil.Error, OSError):
        return None


def data_bytes(pid: int) -> int | None:
    """Return VmData, what a limit on data segments counts; None where the system does not tell."""
    return _status_fields(pid).get("VmData")


def descendants(pid: int) -> tuple[int, ...]:
    """Return the children of a process and their children; empty when it is gone."""
    try:
        return tuple(child.pid for child in psutil.Process(pid).children(recursive=True))
    except (psutil.Error, OSError):
        return ()


def swapped_bytes(pid: int) -> int | None:
    """Return what the system has moved to swap; None where it does not tell."""
    return _status_fields(pid).get("VmSwap")


def major_faults(pid: int) -> int | None:
    """Return how many pages the process has had to read from disk; None where the system does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # the name, in parentheses, may hold anything
        return int(text.rpartition(")")[2].split()[9])
    except (OSError, ValueError, IndexError):
        return None


def total_of(pids: Iterable[int], measure: Callable[[int], int | None]) -> int | None:
    """Return the sum over the processes that are still there; None where there are some and none of them tells."""
    told = [measure(pid) for pid in pids]
    known = [value for value in told if value is not None]
    return sum(known) if known or not told else None


def listening_pid(port: int) -> int | None:
    """Return the process that listens on a TCP port of this machine; None when unknown or not ours to see."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return int(connection.pid)
    return None


def _status_fields(pid: int) -> dict[str, int]:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    fields = (line.partition(":") for line in text.splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in fields if value.strip().endswith(" kB")}
