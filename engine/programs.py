"""The children that we start, by what they are for: the interpreter on a module, or the bundle's one executable."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

LOOK_S = 0.1
"""How often a wait looks whether somebody still wants its end."""
_LEAVE_S = 1.0
"""For our own threads at the pipes of a process that is gone: what still holds these is no child of ours."""

LOG_MARK = "layerdeck log: "
"""Begins a line on a worker's standard error that goes to the log; a worker has none of its own."""
_log = logging.getLogger("layerdeck.engine")

CHILDREN = {
    "worker": "engine.worker",
    "renderer": "engine.worker.renderer",
    "download": "engine.downloads",
    "pdf": "engine.chats.pdf_reader",
    "image": "engine.images.reader",
    "sound": "engine.sounds.reader",
    "importer": "engine.chats.importer",
    "library": "engine.library.child",
    "tunnel": "engine.tunnel",
}
"""Modules that run as programs. In the bundle `app.program` runs them when it is started with `--NAME`."""


def child_argv(child: str, *words: str) -> list[str]:
    """Return the command that runs one of `CHILDREN` with `words` as its arguments."""
    if getattr(sys, "frozen", False):
        return [sys.executable, f"--{child}", *words]
    # -P: the folder we were started in is not ours, and what lies there must not pass for a module
    return [sys.executable, "-P", "-m", CHILDREN[child], *words]


def log_end_of(name: str, process: subprocess.Popen[bytes], detail: str = "") -> None:
    """Write to the log how a process ended that has been collected, and that no `ChildProcess` watches."""
    code = process.returncode
    how = "it does not end" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
    _log.info("%s %s ended: %s%s", name, process.pid, how, detail)


def never() -> bool:
    """Nobody cancels this."""
    return False


def ask_once(
    argv: Sequence[str],
    data: bytes,
    *,
    timeout_s: float,
    max_bytes: int,
    own_group: bool = True,
    cancelled: Callable[[], bool] = never,
    name: str = "",
) -> bytes:
    """Start a process, hand it `data` and return all that it says; it is gone at the end.

    Whatever it does, or is done to it: it has `timeout_s`, and no more than `max_bytes` of what it says are kept. It
    leads a group, and what it started goes with it; without `own_group` it stays in ours, and goes with us. `name` is
    what the log calls it.

    Raises:
        OSError: it could not be started, said too much, took too long, or was `cancelled`.
    """
    process = subprocess.Popen(
        list(argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=own_group,
    )
    listening, telling = process.stdout, process.stdin
    assert listening is not None
    assert telling is not None
    said: list[bytes] = []

    def listen() -> None:
        with suppress(OSError, ValueError), listening as stream:
            said.append(stream.read(max_bytes + 1))

    def tell() -> None:
        with suppress(OSError, ValueError), telling as stream:
            stream.write(data)

    threads = [threading.Thread(target=each, name=f"ask-{process.pid}", daemon=True) for each in (listen, tell)]
    try:
        for thread in threads:
            thread.start()
        _wait(threads[0], timeout_s, cancelled)
        is_late = threads[0].is_alive()
    except RuntimeError as error:  # the system gives us no more threads
        raise OSError(errno.EAGAIN, str(error)) from None
    finally:
        detail = ", after its answer" if said else ", without an answer"
        _kill(process, own_group=own_group)
        log_end_of(name or Path(argv[0]).name, process, detail)
        for thread, stream in zip(threads, (listening, telling), strict=True):
            if thread.ident is not None:
                thread.join(_LEAVE_S)
            else:
                stream.close()
    if is_late and cancelled():
        raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
    if is_late or not said:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    if len(said[0]) > max_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return said[0]


def _wait(thread: threading.Thread, timeout_s: float, cancelled: Callable[[], bool]) -> None:
    """Wait for the end of a thread, so long at most, and until it is cancelled."""
    deadline = time.monotonic() + timeout_s
    while thread.is_alive() and not cancelled() and (left := deadline - time.monotonic()) > 0:
        thread.join(min(LOOK_S, left))


def _kill(process: subprocess.Popen[bytes], *, own_group: bool) -> None:
    """Kill a process, with its group where it leads one, and collect it."""
    if sys.platform == "win32" or not own_group:
        process.kill()
    else:
        # before it is collected its number is nobody else's
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
