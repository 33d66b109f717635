"""Reading what strangers made: a process of its own for each file, with little time and memory and nothing to lose.

A file of another person is a program for whatever decodes it. Its decoder has an alarm, an address space that ends, and
no file system but its own code; it takes the file on standard input, answers on standard output, and is not believed.
"""

from __future__ import annotations

import logging
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from engine.confinement import code_folders, confine, refuse_core_files
from engine.programs import ask_once, child_argv, never

GRACE_SECONDS = 5.0
"""The child's own alarm rings first; where it could not, it is killed this much later."""


def ask_decoder(
    child: str, *words: str, data: bytes, seconds: float, max_bytes: int, cancelled: Callable[[], bool] = never
) -> bytes:
    """Return what one of our children makes of a file, at most `max_bytes`. It does not outlive our group.

    Raises:
        OSError: it could not be started, said too much, took longer than `seconds`, or was `cancelled`.
    """
    return ask_once(
        child_argv(child, *words),
        data,
        timeout_s=seconds + GRACE_SECONDS,
        max_bytes=max_bytes,
        own_group=False,
        cancelled=cancelled,
        name=child,
    )


def confined_input(seconds: float, memory_bytes: int) -> bytes:
    """Return the file on this process's standard input; from then on it has that much time and memory, and no files."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable()  # what a library says of the file is for nobody
    warnings.simplefilter("ignore")
    refuse_core_files()
    data = sys.stdin.buffer.read()
    _limit_memory(memory_bytes)
    confine(readable=code_folders(), writable=())
    return data


def _limit_memory(memory_bytes: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit_bytes = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
