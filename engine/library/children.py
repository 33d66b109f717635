"""Headers read and forecasts made in a child, which is asked again for the rest where a file breaks it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from engine.cancellation import CancelToken
from engine.devices.device import Rig
from engine.errors import EngineError
from engine.fit.strategies.constraints import Constraints
from engine.library.errors import LibraryError
from engine.library.facts import Facts, fingerprint
from engine.library.fit import Fit
from engine.library.names import role_of
from engine.library.orders import AllFound, AnyFound, FactsFound, FitsFound, Order, plan_order, read_order
from engine.process.outcome import EndReason
from engine.process.questions import Questions
from engine.programs import child_argv

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
) -> Iterator[Sequence[tuple[int, Any]]]:
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
