"""The children that we start, by what they are for: the interpreter on a module, or the bundle's one executable."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

_LEAVE_S = 1.0
"""For our own threads at the pipes of a process that is gone: what still holds these is no child of ours."""

CHILDREN = {
    "worker": "engine.worker",
    "renderer": "engine.worker.renderer",
    "download": "engine.downloads",
    "pdf": "engine.chats.pdf_reader",
    "image": "engine.images.reader",
    "sound": "engine.sounds.reader",
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


def ask_once(argv: Sequence[str], data: bytes, *, timeout_s: float, max_bytes: int) -> bytes:
    """Start a process, hand it `data` and return all that it says; it is gone, with what it started, at the end.

    Whatever it does, or is done to it: it has `timeout_s`, and no more than `max_bytes` of what it says are kept.

    Raises:
        OSError: it could not be started, said too much or took too long.
    """
    process = subprocess.Popen(
        list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    said: list[bytes] = []

    def listen() -> None:
        assert process.stdout is not None
        with suppress(OSError, ValueError), process.stdout as stream:
            said.append(stream.read(max_bytes + 1))

    def tell() -> None:
        assert process.stdin is not None
        with suppress(OSError, ValueError), process.stdin as stream:
            stream.write(data)

    threads = [threading.Thread(target=each, name=f"ask-{process.pid}", daemon=True) for each in (listen, tell)]
    try:
        for thread in threads:
            thread.start()
        threads[0].join(timeout_s)
        is_late = threads[0].is_alive()
    except RuntimeError as error:  # the system gives us no more threads
        raise OSError(errno.EAGAIN, str(error)) from None
    finally:
        _kill_all(process)
        for thread in threads:
            if thread.ident is not None:
                thread.join(_LEAVE_S)
    if is_late or not said:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    if len(said[0]) > max_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return said[0]


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its group, and collect it."""
    if sys.platform == "win32":
        process.kill()
    else:
        # before it is collected its number is nobody else's
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
