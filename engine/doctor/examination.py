"""Runs an examination step by step: what a step cannot find out costs that step only, and a cancel keeps the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.cancellation import CancelToken
from engine.doctor.report import Check, Report
from engine.errors import EngineError


@dataclass(frozen=True, slots=True)
class Step:
    """`words` says what is being looked at; `look` yields checks as they are made, and may raise `EngineError`."""

    name: str
    words: str
    look: Callable[[], Iterable[Check]]
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` steps are over; `words` says what is looked at now; `checks` are those made so far."""

    done: int
    total: int
    words: str
    checks: tuple[Check, ...]


def examine(steps: Sequence[Step], tell: Callable[[Progress], None], cancel: CancelToken) -> Report:
    """Make all checks, in the calling thread; return what was found until the end or the cancel."""
    checks: list[Check] = []
    for done, step in enumerate(steps):
        if cancel.cancelled:
            return Report(tuple(checks), is_whole=False)
        tell(Progress(done, len(steps), step.words, tuple(checks)))
        try:
            for check in step.look():
                checks.append(check)
                tell(Progress(done, len(steps), step.words, tuple(checks)))
                if cancel.cancelled:
                    break
        except EngineError as error:
            if not cancel.cancelled:
                checks.append(Check(name=step.name, device=step.device, ok=None, detail=error.summary()))
    tell(Progress(len(steps), len(steps), "", tuple(checks)))
    return Report(tuple(checks), is_whole=not cancel.cancelled)
