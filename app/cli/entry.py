"""The entry point of `layerdeck-cli`, and its handlers for SIGINT, SIGTERM and SIGHUP, which end a command.

The handlers are installed before the other modules are imported, because a signal may arrive during the imports.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from app.cli import exit_codes

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


def raise_on_interrupt() -> None:
    """Make SIGINT, SIGTERM and SIGHUP raise `KeyboardInterrupt`.

    While the exception propagates, context managers end the child processes.
    """
    _install(_raise)


@contextmanager
def on_interrupt(call: Callable[[], None]) -> Iterator[None]:
    """Context in which SIGINT, SIGTERM and SIGHUP only call `call`. At its end the previous handlers are restored."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        call()

    before = [(number, signal.getsignal(number)) for number in _numbers()]
    _install(handle)
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _raise(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _install(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in _numbers():
        signal.signal(number, handler)


def _numbers() -> list[signal.Signals]:
    return [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


def _open_streams() -> None:
    """Open the null device in place of each standard stream that the parent has closed (`2>&-` in a shell).

    `sys.stderr`, for example, is None if descriptor 2 is closed. The next file or pipe that is opened would get
    descriptor 2, and so receive the output for standard error.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free descriptor, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(nowhere, "w" if number else "r", encoding="utf-8"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments`, and return its exit code. None: the arguments of the process are used."""
    try:
        raise_on_interrupt()
        _open_streams()
        from app.cli.dispatch import run

        return run(arguments)
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
