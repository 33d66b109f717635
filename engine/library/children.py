"""Reads headers and makes forecasts in a child process.

If a file crashes the child, another child is started for the rest of the files. Both tasks are pure Python, so in a
thread of the window's process they would hold the GIL and delay every frame. The files are untrusted: the child,
`python -m engine.library.children`, has no write access, carries out one request, and ends with its parent.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from engine.base.cancellation import CancelToken
from engine.base.confinement import LIBRARY
from engine.base.engine_build import own_version
from engine.base.errors import EngineError, LibraryError
from engine.base.programs import child_argv
from engine.base.values import replace
from engine.devices.device import Rig
from engine.library.child_messages import (
    AllFound,
    AnyFound,
    FactsFound,
    FitsFound,
    LibraryRequest,
    PlanModels,
    ReadHeaders,
    Working,
    path_of,
    plan_request,
    read_request,
)
from engine.library.facts import Facts, fingerprint
from engine.library.fit import Fit
from engine.library.names import role_of
from engine.library.planning import Job
from engine.model.gguf.parts import named_parts
from engine.planning.fit.strategies.constraints import Constraints
from engine.runtime.process.blocking_child import BlockingChild
from engine.runtime.process.outcome import EndReason
from engine.runtime.protocol.heartbeat import WorkHeartbeat
from engine.runtime.protocol.messages import Message
from engine.runtime.protocol.pipe import Limits, limit_work, run_child

# Crashes of the child in one request after which the files are no longer taken for the cause.
MAX_BREAKDOWNS = 64
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2"}
# Seconds without a message before the child counts as stuck; longer than any working disk needs.
SILENT_S = 120.0
_BROKE = "crashed the process that read it"
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
    """Read the headers of models in a child process, and call `take` in this thread with the values of each header.

    `wanted`: the paths of the parts of each model; `take` gets them with the header values.
    `argv`: command of the child, None for `python -m engine.library.children`.

    Raises:
        LibraryError: if no child can be started, or if children crash again and again.
    """

    def broken(paths: tuple[Path, ...], is_crash: bool) -> Facts:
        crashed = own_version() if is_crash else ""
        return Facts(kind=role_of(paths[0].name), error=_BROKE, fingerprint=fingerprint(paths[0]), crashed=crashed)

    _work_through(
        wanted, read_request, FactsFound, take, broken, token, child_argv("library") if argv is None else argv
    )


def plan_models(
    wanted: Sequence[Job],
    rig: Rig,
    strategy: str,
    constraints: Constraints,
    take: Callable[[str, Fit], None],
    token: CancelToken,
) -> None:
    """Forecast models in a child process, and call `take` in this thread with each forecast.

    `wanted`: for each model, its path, its projector and its fingerprint.
    `strategy`: name of the strategy that finds the layouts.
    `take`: called with the fingerprint of the model and the forecast.

    Raises:
        LibraryError: if no child can be started, or if children crash again and again.
    """

    def request(asked: Sequence[Job]) -> LibraryRequest:
        return plan_request([(job.path, job.projector) for job in asked], rig, strategy, constraints)

    def broken(asked: Job, _is_crash: bool) -> Fit:
        projector = "" if asked.projector is None else asked.projector.name
        return Fit("unknown", strategy, reason=f"{asked.path.name} {_BROKE}.", projector=projector)

    _work_through(
        wanted, request, FitsFound, lambda asked, fit: take(asked.mark, fit), broken, token, child_argv("library")
    )


def _work_through(
    wanted: Sequence[_Asked],
    request: Callable[[Sequence[_Asked]], LibraryRequest],
    kind: type[FactsFound | FitsFound],
    take: Callable[[_Asked, _Found], None],
    broken: Callable[[_Asked, bool], _Found],
    token: CancelToken,
    argv: Sequence[str],
) -> None:
    """Have child processes handle all items of `wanted`, and call `take` with each item and its result.

    If a child crashes, the items without a result are divided between two new children. This is repeated until a child
    that crashes has a single item left. Then `broken` makes the result of this item.

    `broken`: called with the item, and with True if the work on it crashed the child, False if the child ended for
    another reason.
    `request`: makes the request for some items.
    `kind`: class of the answers.
    `argv`: command of the children.
    """
    waiting = [wanted] if wanted else []
    n_broken = 0
    while waiting and not token.cancelled:
        left = dict(enumerate(waiting.pop()))
        is_whole = is_crash = False
        with closing(_answers(request(list(left.values())), kind, token, argv)) as answers:
            for found in answers:
                # An empty answer is the last one: the child has finished.
                is_whole, is_crash = found == (), found is None
                for number, value in found or ():
                    if number in left and not token.cancelled:
                        take(left.pop(number), value)
        if is_whole or token.cancelled:
            continue
        n_broken += 1
        _log.info("library: a process ended before its time, %d models were left", len(left))
        if n_broken == MAX_BREAKDOWNS:
            raise LibraryError("The processes that read model files keep crashing; scan again later.")
        rest = list(left.values())
        if len(rest) == 1:
            take(rest[0], broken(rest[0], is_crash))
        else:
            middle = len(rest) // 2
            # The first half last, because `pop` takes the last one: results come in the order of `wanted`.
            waiting += [half for half in (rest[middle:], rest[:middle]) if half]


def _answers(
    request: LibraryRequest, kind: type[FactsFound | FitsFound], token: CancelToken, argv: Sequence[str]
) -> Generator[Sequence[tuple[int, Any]] | None]:
    """Send `request` to a new child, and yield the content of each answer: pairs (index of the model, result).

    At the end, one more value tells how the child ended: `()` if it finished the request, None if it crashed during the
    request. There is no such value if the child ended for another reason: it was silent for too long (a disk that
    hangs), or was ended by the user or the system.

    `kind`: class of the answers.
    `argv`: command of the child.

    Raises:
        LibraryError: the child cannot be started.
    """
    child = BlockingChild(
        argv=argv,
        name="library",
        stall_limit_s=SILENT_S,
        environment=_ENVIRONMENT,
        messages=AnyFound,
    )
    try:
        with child:
            try:
                for answer in child.stream(request, kind, AllFound, token):
                    yield answer.found
                yield ()
            except BaseException:
                # Closed early or after an error: nobody waits for the rest of the request.
                child.end(kill=True)
                raise
    except EngineError as error:
        if child.outcome is not None and child.outcome.reason is EndReason.NOT_STARTED:
            raise LibraryError(
                f"The process that reads model files cannot be started ({child.outcome.detail})."
            ) from error
        if child.has_begun and child.outcome is not None and child.outcome.ended_by_itself:
            yield None


# Seconds for which results are collected: every message wakes the window up.
HOLD_S = 0.05
# Seconds of processor time between two results. Longer than any forecast takes.
WORK_S = 900.0
_MOST_HELD = 64
_NICENESS = 5


class BatchSender:
    """Sends results from the child to the parent process in groups, so that the window is not woken up for each result.

    `send`: called with the results of a group: pairs of a model's index in the request, and its result.
    `hold_s`: longest time that a result is held back, in seconds.
    """

    def __init__(self, send: Callable[[Any], None], hold_s: float) -> None:
        self._send, self._hold_s = send, hold_s
        self._held: list[tuple[int, Any]] = []
        self._sent_s = time.monotonic()

    def add(self, number: int, found: Any) -> None:
        """Buffer one more result. Send all buffered results if there are many, or if `hold_s` seconds have passed.

        `number`: index of the model in the request.
        `found`: the result for the model.
        """
        # Starts the allowance anew: it is for one model, and not for the request.
        limit_work(WORK_S)
        self._held.append((number, found))
        if len(self._held) >= _MOST_HELD or time.monotonic() - self._sent_s >= self._hold_s:
            self.flush()

    def flush(self) -> None:
        """Send the buffered results now."""
        if self._held:
            self._send(tuple(self._held))
        self._held = []
        self._sent_s = time.monotonic()


def main() -> None:
    """Run the child process: carry out one request from standard input."""
    if hasattr(os, "nice"):
        # A scan must not delay the window.
        os.nice(_NICENESS)
    run_child(LibraryRequest, lambda request: Limits(LIBRARY, tuple(_folders(request))), carry_out)


def _folders(request: LibraryRequest) -> set[Path]:
    """Return the folders that the child must be able to read for a request.

    These are the folders of the models and projectors, and the folders of the targets if parts are symbolic links.
    """
    folders: set[Path] = set()
    for path in {path_of(each).absolute() for each in chain.from_iterable(request.models) if each}:
        folders |= {path.parent, *(Path(os.path.realpath(part)).parent for part in named_parts(path))}
    return folders


def carry_out(request: LibraryRequest, send: Callable[[Message], None]) -> None:
    """Carry out a request in the child process, and send its results and heartbeats with `send`."""
    limit_work(WORK_S)
    with WorkHeartbeat(lambda: send(Working())):
        match request:
            case ReadHeaders():
                answers = BatchSender(lambda found: send(FactsFound(found=found)), HOLD_S)
                _read(request, answers)
            case PlanModels():
                # A forecast takes much longer than a message, so each is sent at once.
                answers = BatchSender(lambda found: send(FitsFound(found=found)), 0.0)
                _plan(request, answers)
        answers.flush()
    send(AllFound())


def _read(request: ReadHeaders, answers: BatchSender) -> None:
    from engine.library.facts import read_many

    wanted = (tuple(map(path_of, model)) for model in request.models)
    read_many(enumerate(wanted), answers.add)


def _plan(request: PlanModels, answers: BatchSender) -> None:
    from engine.library.fitting import find_fit, unknown_fit
    from engine.model.gguf.reader import read_model
    from engine.planning.memory.side_files import SideFiles, read_projector

    for number, (encoded, projector_path) in enumerate(request.models):
        constraints = request.constraints
        # A projector that cannot be read is not counted: the model can be used without it.
        with suppress(EngineError):
            projector = read_projector(path_of(projector_path)) if projector_path else None
            constraints = replace(constraints, side_files=SideFiles(projector))
        try:
            fit = find_fit(read_model(path_of(encoded)), request.rig, request.strategy, constraints)
        except EngineError as error:
            fit = unknown_fit(error)
        if constraints.side_files.projector is not None:
            # Also without a forecast, so that the same files are not asked again.
            fit = structs.replace(fit, projector=constraints.side_files.projector.path.name)
        answers.add(number, fit)


if __name__ == "__main__":
    main()
