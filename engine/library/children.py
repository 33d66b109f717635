"""Headers read and forecasts made in a child, which is asked again for the rest where a file breaks it."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from engine.cancellation import CancelToken
from engine.devices.device import Rig
from engine.errors import LibraryError
from engine.fit.strategies.constraints import Constraints
from engine.json_file import UNREADABLE
from engine.library.facts import Facts, fingerprint
from engine.library.fit import Fit
from engine.library.names import role_of
from engine.library.orders import MAX_ANSWER_BYTES, Order, plan_order, read_frame, read_order, write_frame
from engine.process.system import close_pipe, signal_group, spawn, wait_for_exit
from engine.programs import child_argv, log_end_of

MAX_BREAKDOWNS = 64
"""So many processes may end before their time in one order: then it is not the files."""
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2"}
_END_S = 5.0
SILENT_S = 120.0
"""Without an answer and without work of the processor, longer than any disk that still answers: it was stopped, or
hangs."""
WORK_S = 900.0
"""Of its processor time without an answer: longer than any forecast."""
_LOOK_S = 1.0
_MAX_LINES, _MAX_LINE_BYTES = 40, 4096
_BROKE = "broke the process that read it"
_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found", Facts, Fit)
_log = logging.getLogger("layerdeck.engine")


def read_headers(
    wanted: Sequence[tuple[Path, ...]],
    take: Callable[[tuple[Path, ...], Facts], None],
    token: CancelToken,
    *,
    argv: Sequence[str] | None = None,
) -> None:
    """Read the headers of models, each with its parts, and hand what they say to `take` in this thread.

    `argv` is the command of the child, by default our own.

    Raises:
        LibraryError: where no process can be started, or they all break.
    """

    def broken(paths: tuple[Path, ...]) -> Facts:
        return Facts(kind=role_of(paths[0].name), error=_BROKE, fingerprint=fingerprint(paths[0]))

    _work_through(wanted, read_order, Facts, take, broken, token, child_argv("library") if argv is None else argv)


def plan_models(
    wanted: Sequence[tuple[str, Path]],
    rig: Rig,
    strategy: str,
    constraints: Constraints,
    take: Callable[[str, Fit], None],
    token: CancelToken,
) -> None:
    """Forecast models, each a fingerprint and a path, and hand each forecast to `take`; raises as `read_headers`."""

    def order(asked: Sequence[tuple[str, Path]]) -> Order:
        return plan_order([path for _, path in asked], rig, strategy, constraints)

    def broken(asked: tuple[str, Path]) -> Fit:
        return Fit("unknown", strategy, reason=f"{asked[1].name} {_BROKE}.")

    _work_through(wanted, order, Fit, lambda asked, fit: take(asked[0], fit), broken, token, child_argv("library"))


def _work_through(
    wanted: Sequence[_Asked],
    order: Callable[[Sequence[_Asked]], Order],
    kind: type[_Found],
    take: Callable[[_Asked, _Found], None],
    broken: Callable[[_Asked], _Found],
    token: CancelToken,
    argv: Sequence[str],
) -> None:
    """Have everything of `wanted` done; what breaks a child is found by halves, and is told as `broken`."""
    waiting = [wanted] if wanted else []
    n_broken = 0
    while waiting and not token.cancelled:
        left = dict(enumerate(waiting.pop()))
        is_whole = False
        with closing(_answers(order(list(left.values())), kind, token, argv)) as answers:
            for found in answers:
                is_whole = not found
                for number, value in found:
                    if number in left and not token.cancelled:
                        take(left.pop(number), value)
        if is_whole or token.cancelled:
            continue
        n_broken += 1
        _log.info("library: a process ended before its time, %d models were left", len(left))
        if n_broken == MAX_BREAKDOWNS:
            raise LibraryError("The processes that look into models end before their time; look again later.")
        rest = list(left.values())
        if len(rest) == 1:
            take(rest[0], broken(rest[0]))
        else:
            middle = len(rest) // 2
            waiting += [half for half in (rest[middle:], rest[:middle]) if half]


def _answers(
    order: Order, kind: type[_Found], token: CancelToken, argv: Sequence[str]
) -> Generator[list[tuple[int, _Found]]]:
    """Yield what a child of its own answers, an empty list last where it came to its end."""
    decoder = msgspec.msgpack.Decoder(list[tuple[int, kind]])  # type: ignore[valid-type]
    try:
        process = spawn(argv, _ENVIRONMENT)
    except OSError as error:
        raise LibraryError(f"No process can be started to look into models ({error.strerror or error}).") from error
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        watch = _Watch(process)
    except RuntimeError as error:  # the system gives us no more threads
        signal_group(process, kill=True)
        wait_for_exit(process, _END_S)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                close_pipe(pipe)
        raise LibraryError(f"No process can be started to look into models ({error}).") from error
    try:
        with token.waking(watch.kill), suppress(OSError, *UNREADABLE):
            write_frame(process.stdin, order)
            while (data := read_frame(process.stdout, MAX_ANSWER_BYTES)) is not None:
                watch.note_sign()
                yield decoder.decode(data)
    finally:
        watch.end()


class _Watch:
    """Ends a process that is silent for too long, and reads what it says to people, which would stop it otherwise."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._words: deque[str] = deque(maxlen=_MAX_LINES)
        self._sign_s, self._answer_work_s = time.monotonic(), 0.0
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"library-{process.pid}", daemon=True)
            for target in (self._read_words, self._look)
        ]
        for thread in self._threads:
            thread.start()

    def note_sign(self) -> None:
        """The process has said something."""
        self._sign_s, self._answer_work_s = time.monotonic(), self._work_s()

    def kill(self) -> None:
        signal_group(self._process, kill=True)

    def end(self) -> None:
        """End the process, waiting a bounded time."""
        self.kill()
        wait_for_exit(self._process, _END_S)
        log_end_of("library", self._process)
        self._ended.set()
        for thread in self._threads:
            thread.join(_END_S)
        if self._words:
            _log.info("library: a process said: %s", "\n".join(self._words))
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                close_pipe(pipe)

    def _read_words(self) -> None:
        assert self._process.stderr is not None
        with suppress(OSError, ValueError), self._process.stderr as stream:
            while line := stream.readline(_MAX_LINE_BYTES):
                self._words.append(line.decode("utf-8", "replace").rstrip())

    def _work_s(self) -> float:
        """Return the processor's time that the process has had; 0 where it is gone."""
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def _look(self) -> None:
        before_s = 0.0
        while not self._ended.wait(_LOOK_S):
            work_s = self._work_s()
            if work_s > before_s:
                before_s, self._sign_s = work_s, time.monotonic()
            if time.monotonic() - self._sign_s > SILENT_S or work_s - self._answer_work_s > WORK_S:
                self.kill()
