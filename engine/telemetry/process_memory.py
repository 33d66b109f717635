"""What a process holds of the host's memory."""

from __future__ import annotations

from collections.abc import Iterable
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


def total_resident_bytes(pids: Iterable[int]) -> int:
    """Return the sum over the processes that are still there."""
    return sum(resident_bytes(pid) or 0 for pid in pids)


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
