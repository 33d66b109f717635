"""Headers read and forecasts made in a child, which is asked again for the rest if a file breaks it.

Both are Python from beginning to end: in a thread of the window they would hold up every frame. Files are strangers':
the child, `python -m engine.library.children`, has no rights to write, carries out one request, and ends with its
parent.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError, LibraryError
from engine.base.programs import child_argv
from engine.devices.device import Rig
from engine.library.facts import Facts, fingerprint
from engine.library.fit import Fit
from engine.library.names import role_of
from engine.library.orders import (
    AllFound,
    AnyFound,
    FactsFound,
    FitsFound,
    Order,
    PlanModels,
    ReadHeaders,
    Working,
    path_of,
    plan_order,
    read_order,
)
from engine.planning.fit.strategies.constraints import Constraints
from engine.runtime.process.outcome import EndReason
from engine.runtime.process.questions import Questions
from engine.runtime.protocol.effort import WorkTicks
from engine.runtime.protocol.messages import Message
from engine.runtime.protocol.pipe import Limits, limit_work, run_child

MAX_BREAKDOWNS = 64
"""So many processes may end before their time in one order: then it is not the files."""
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2"}
SILENT_S = 120.0
"""Without an answer and without a sign of work, longer than any disk that still answers: it was stopped, or hangs."""
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

    _work_through(wanted, read_order, FactsFound, take, broken, token, child_argv("library") if argv is None else argv)


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

    _work_through(
        wanted, order, FitsFound, lambda asked, fit: take(asked[0], fit), broken, token, child_argv("library")
    )


def _work_through(
    wanted: Sequence[_Asked],
    order: Callable[[Sequence[_Asked]], Order],
    kind: type[FactsFound | FitsFound],
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
    order: Order, kind: type[FactsFound | FitsFound], token: CancelToken, argv: Sequence[str]
) -> Generator[Sequence[tuple[int, Any]]]:
    """Yield what a child of its own answers, nothing at last if it came to its end."""
    child = Questions(
        argv=argv,
        name="library",
        stall_timeout_s=SILENT_S,
        environment=_ENVIRONMENT,
        messages=AnyFound,
    )
    try:
        with child:
            try:
                for answer in child.stream(order, kind, AllFound, token):
                    yield answer.found
                yield ()
            except BaseException:
                child.end(kill=True)
                raise
    except EngineError as error:
        if child.outcome is not None and child.outcome.reason is EndReason.NOT_STARTED:
            raise LibraryError(f"No process can be started to look into models ({child.outcome.detail}).") from error


HOLD_S = 0.05
"""Headers are sent some at a time: the window wakes up for each message."""
WORK_S = 900.0
"""Of this process's processor time without an answer: longer than any forecast."""
_MOST_HELD = 64
_NICENESS = 5


class Answers:
    """Sends what was found, held back for `hold_s` at most as long as more comes."""

    def __init__(self, send: Callable[[Any], None], hold_s: float) -> None:
        self._send, self._hold_s = send, hold_s
        self._held: list[tuple[int, Any]] = []
        self._sent_s = time.monotonic()

    def add(self, number: int, found: Any) -> None:
        """Send what was found of a model, soon."""
        limit_work(WORK_S)
        self._held.append((number, found))
        if len(self._held) >= _MOST_HELD or time.monotonic() - self._sent_s >= self._hold_s:
            self.flush()

    def flush(self) -> None:
        """Send what is held back."""
        if self._held:
            self._send(tuple(self._held))
        self._held = []
        self._sent_s = time.monotonic()


def main() -> None:
    """Carry out one request."""
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    run_child(Order, lambda _order: Limits(readable=(Path("/"),)), carry_out)


def carry_out(order: Order, send: Callable[[Message], None]) -> None:
    """Do what is ordered, sending what is found."""
    limit_work(WORK_S)
    with WorkTicks(lambda: send(Working())):
        match order:
            case ReadHeaders():
                answers = Answers(lambda found: send(FactsFound(found=found)), HOLD_S)
                _read(order, answers)
            case PlanModels():
                answers = Answers(lambda found: send(FitsFound(found=found)), 0.0)
                _plan(order, answers)
        answers.flush()
    send(AllFound())


def _read(order: ReadHeaders, answers: Answers) -> None:
    from engine.library.facts import read_many

    wanted = (tuple(map(path_of, model)) for model in order.models)
    read_many(enumerate(wanted), answers.add)


def _plan(order: PlanModels, answers: Answers) -> None:
    from engine.library.fitting import find_fit, unknown_fit
    from engine.model.gguf.reader import read_model

    for number, encoded in enumerate(order.models):
        try:
            fit = find_fit(read_model(path_of(encoded)), order.rig, order.strategy, order.constraints)
        except EngineError as error:
            fit = unknown_fit(error)
        answers.add(number, fit)


if __name__ == "__main__":
    main()
