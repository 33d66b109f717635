"""Functions to start, signal and reap a process that leads a process group."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

from engine.base.programs import child_argv

_DRAIN_S = 1.0


def worker_argv(role: str = "worker") -> list[str]:
    """Return the command of the model child. `role`: only shown in process lists."""
    return child_argv("worker", role)


_SECRET = re.compile("AUTH|CREDENTIAL|KEY|PASS|SECRET|TOKEN")
"""Words in the names of environment variables with secrets, such as HF_TOKEN, OPENAI_API_KEY, SSH_AUTH_SOCK."""


def is_secret(name: str) -> bool:
    """Return whether an environment variable probably holds a secret. Such variables go to no child and into no log."""
    return _SECRET.search(name.upper()) is not None


def spawn(
    argv: Sequence[str],
    further: Mapping[str, str],
    *,
    own_group: bool = True,
    stderr: int = subprocess.PIPE,
    inherited: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process with pipes, with our package on its PYTHONPATH.

    Passwords and tokens in our environment are not passed on (`is_secret`).

    `further`: environment variables to add.
    `own_group`: whether the process leads a process group of its own.
    `stderr`: argument of `subprocess.Popen`.
    `inherited`: descriptors that the process inherits.

    Raises:
        OSError: it cannot be started.
    """
    # The child runs `python -m engine...`, wherever the application was started.
    root = str(Path(__file__).resolve().parents[3])
    path = os.environ.get("PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not is_secret(name)}
    environment = {**kept, "PYTHONPATH": root if not path else root + os.pathsep + path, **further}
    flags = 0
    if sys.platform == "win32":
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
    lifeline = _open_lifeline()
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            start_new_session=own_group,
            creationflags=flags,
            # As large as a pipe on Linux (64 KiB): a message may have many megabytes, and 8 KiB would mean more calls.
            bufsize=1 << 16,
            pass_fds=inherited if lifeline is None else (*inherited, lifeline),
        )
        if lifeline is not None:
            _end_with_us(lifeline, -process.pid if own_group else process.pid)
        return process
    finally:
        if lifeline is not None:
            os.close(lifeline)


_SET_SIGNAL = 10
"""F_SETSIG of `asm-generic/fcntl.h`, which Python's `fcntl` does not have."""


@cache
def _make_pipe_of_our_life() -> tuple[int, int]:
    """Return a pipe by which the kernel notices the end of this process.

    The kernel closes its writing end when this process ends, and not before, because no other process has it open.
    Nothing is written to the pipe.
    """
    return os.pipe()


def _open_lifeline() -> int | None:
    """Return a new descriptor by which the kernel signals a child when this process ends.

    It is the reading end of `_make_pipe_of_our_life`, opened for one child. None if the system cannot do that.
    """
    if not sys.platform.startswith("linux"):
        return None
    # Opened anew, because owner and signal belong to an open file: a duplicate would share them with all children.
    # A confined process cannot open it again; its children end by the end of their input.
    with suppress(OSError):
        return os.open(f"/proc/self/fd/{_make_pipe_of_our_life()[0]}", os.O_RDONLY | os.O_CLOEXEC)
    return None


def _end_with_us(lifeline: int, owner: int) -> None:
    """Make the kernel kill `owner` (a process id, or a negative group id) when this process ends for any reason.

    Without this, the child would end late on a busy machine: while it computes or imports modules, it does not notice
    the end of its input. This function sets `owner` and SIGKILL for the open file `lifeline` (`F_SETOWN`, `F_SETSIG`,
    `O_ASYNC` of fcntl(2)). The kernel sends the signal when this process, the only writer of the pipe, has ended. The
    child only has to hold the file open. PR_SET_PDEATHSIG is unsuitable: it would kill the child when the thread that
    started it ends.

    `lifeline`: the reading end of the pipe, opened for this child (`_open_lifeline`).
    """
    if sys.platform.startswith("linux"):
        import fcntl

        with suppress(OSError):  # The child has ended already.
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, owner)
            fcntl.fcntl(lifeline, _SET_SIGNAL, signal.SIGKILL)
            fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)


def wait_for_exit(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Wait at most `timeout_s` for the end of a process.

    Return its exit code, or the negative number of the signal that ended it; None if it still runs.
    """
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def close_pipe(pipe: IO[bytes]) -> None:
    """Close this process's end of a pipe."""
    with suppress(OSError):  # Closing flushes the buffer, which fails if the process has ended.
        pipe.close()


def signal_process(process: subprocess.Popen[bytes], *, kill: bool, group: bool = True) -> None:
    """Send SIGTERM to a process, or SIGKILL if `kill`. Does nothing if it has ended.

    `group`: whether to signal its whole process group. On Windows the process alone is killed in any case.
    """
    if process.poll() is not None:
        return  # The system may have given its number to another process.
    # It may still end between the check and the signal.
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            process.kill()
        elif group:
            os.killpg(process.pid, signal.SIGKILL if kill else signal.SIGTERM)
        else:
            process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)


def output_of(argv: Sequence[str], *, timeout_s: float, max_bytes: int) -> bytes:
    """Run a foreign program and return its standard output. Its process group is killed before this returns.

    Raises:
        OSError: it cannot be started, writes more than `max_bytes`, or takes longer than `timeout_s`.
    """
    process = spawn(argv, {}, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    assert process.stdout is not None
    close_pipe(process.stdin)
    outputs: list[bytes] = []
    stream = process.stdout

    def listen() -> None:
        with suppress(OSError, ValueError), stream:
            outputs.append(stream.read(max_bytes + 1))

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
            # A process that left the group may still hold the pipe; it is not waited for.
            listener.join(_DRAIN_S)
    if is_late or not outputs:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    if len(outputs[0]) > max_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return outputs[0]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its whole group, even if the process itself has ended, and reap it."""
    if sys.platform == "win32":
        process.kill()
    else:
        # The process was not collected yet, so that its number, which is the group's, is not given to another one.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    wait_for_exit(process, _DRAIN_S)
