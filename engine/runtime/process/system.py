"""Starting, signalling and collecting a process that leads a group of its own."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from engine.base.programs import child_argv

_DRAIN_S = 1.0


def worker_argv(role: str = "worker") -> list[str]:
    """Return the command that runs a worker.

    `role` changes nothing: it tells people who look at their processes what this one is for.
    """
    return child_argv("worker", role)


def spawn(
    argv: Sequence[str], further: Mapping[str, str], *, own_group: bool = True, stderr: int = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    """Start a process with pipes, our package on its path and the `further` environment.

    It leads a new group; without `own_group` it stays in ours.

    Raises:
        OSError: if it cannot be started.
    """
    root = str(Path(__file__).resolve().parents[3])
    path = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": root if not path else root + os.pathsep + path, **further}
    flags = 0
    if sys.platform == "win32":
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
    return subprocess.Popen(
        list(argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment,
        start_new_session=own_group,
        creationflags=flags,
        # As large as the system's pipe: a message may have many megabytes.
        bufsize=1 << 16,
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


def signal_process(process: subprocess.Popen[bytes], *, kill: bool, group: bool = True) -> None:
    """Terminate or kill `process`, with the `group` that it leads; nothing happens if it has been collected."""
    if process.poll() is not None:
        return  # Its number may belong to somebody else by now.
    # It may also end between the look and the signal.
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            process.kill()
        elif group:
            os.killpg(process.pid, signal.SIGKILL if kill else signal.SIGTERM)
        else:
            process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)


def output_of(argv: Sequence[str], *, timeout_s: float, max_bytes: int) -> bytes:
    """Run a program that is not ours and return its standard output; it is gone at the end, with what it started.

    Raises:
        OSError: if it cannot be started, says more than `max_bytes`, or takes longer than `timeout_s`.
    """
    process = spawn(argv, {}, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    assert process.stdout is not None
    close_pipe(process.stdin)
    said: list[bytes] = []
    stream = process.stdout

    def listen() -> None:
        with suppress(OSError, ValueError), stream:
            said.append(stream.read(max_bytes + 1))

    listener = threading.Thread(target=listen, name=f"output-{process.pid}", daemon=True)
    try:
        listener.start()
        listener.join(timeout_s)
        is_late = listener.is_alive()
    except RuntimeError as error:  # the system gives us no more threads
        close_pipe(stream)
        raise OSError(errno.EAGAIN, str(error)) from None
    finally:
        _kill_group(process)
        if listener.ident is not None:
            # What still holds the pipe after that is no child of ours.
            listener.join(_DRAIN_S)
    if is_late or not said:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    if len(said[0]) > max_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return said[0]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill and collect a process, and its group even if the process itself has ended."""
    if sys.platform == "win32":
        process.kill()
    else:
        # Until it is collected its number is nobody else's.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    wait_for_exit(process, _DRAIN_S)
