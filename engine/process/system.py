"""Starting, signalling and collecting a process that leads a group of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from engine.programs import child_argv


def worker_argv(role: str = "worker") -> list[str]:
    """Return the command that runs a worker.

    `role` changes nothing: it tells people who look at their processes what this one is for.
    """
    return child_argv("worker", role)


def spawn(argv: Sequence[str], further: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process with pipes, our package on its path and the `further` environment; it leads a new group.

    Raises:
        OSError: where it cannot be started.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": root if not path else root + os.pathsep + path, **further}
    flags = 0
    if sys.platform == "win32":
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
    return subprocess.Popen(
        list(argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
        creationflags=flags,
    )


def wait_for_exit(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Wait at most `timeout_s`; return the exit code (negative: a signal), None if it still runs."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def close_pipe(pipe: IO[bytes]) -> None:
    """Close our end of a pipe."""
    with suppress(OSError):  # What was still buffered has no reader any more.
        pipe.close()


def signal_group(process: subprocess.Popen[bytes], *, kill: bool) -> None:
    """Terminate or kill the group that `process` leads; nothing happens when it has already been collected."""
    if process.poll() is not None:
        return  # Its number may belong to somebody else by now.
    # It may also end between the look and the signal.
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL if kill else signal.SIGTERM)
