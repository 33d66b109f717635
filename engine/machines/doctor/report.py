"""An examination: it runs step by step, and what came of it are values: checks, and the file that people send.

What a step cannot find out costs that step only, and a cancel keeps the results of the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.base.cancellation import CancelToken
from engine.base.errors import ArgumentError, EngineError
from engine.base.json_file import encode_document, write_file


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


Figure = int | float | str | bool | None


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. `ok` None: it could not be found out. `figures` have their unit in their name."""

    name: str
    device: str | None = None
    ok: bool | None = True
    detail: str = ""
    figures: dict[str, Figure] = {}


class Report(msgspec.Struct, frozen=True):
    """All checks, in the order in which they were made. `is_whole`: nobody cancelled it."""

    checks: tuple[Check, ...] = ()
    is_whole: bool = True

    @property
    def is_sound(self) -> bool:
        """Whether nothing was found wrong."""
        return all(check.ok is not False for check in self.checks)

    @property
    def summary(self) -> str:
        """What came of it, in one sentence."""
        wrong = [check for check in self.checks if check.ok is False]
        end = "" if self.is_whole else " It was cancelled before its end."
        if not wrong:
            return f"Nothing wrong was found in {len(self.checks)} checks.{end}"
        names = ", ".join(dict.fromkeys(" ".join(filter(None, (each.device, each.name))) for each in wrong))
        return f"{len(wrong)} of {len(self.checks)} checks failed: {names}.{end}"


def document(report: Report) -> dict[str, object]:
    """Return the file's document."""
    return {"version": 1, "is_whole": report.is_whole, "checks": [msgspec.to_builtins(each) for each in report.checks]}


def without_names(report: Report, names: Mapping[str, str]) -> Report:
    """Return the report with each of `names` (what is personal, and what stands for it) replaced in all its texts."""
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    # A user called "root" or "cpu" is not to spoil other words.
    pattern = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in longest_first))

    def cleaned(text: str) -> str:
        return pattern.sub(lambda found: names[found.group()], text) if longest_first else text

    def checked(check: Check) -> Check:
        figures = {key: cleaned(value) if isinstance(value, str) else value for key, value in check.figures.items()}
        return msgspec.structs.replace(check, detail=cleaned(check.detail), figures=figures)

    return msgspec.structs.replace(report, checks=tuple(map(checked, report.checks)))


def write_report(path: Path, report: Report) -> None:
    """Write the document of `report`; a reader finds the old file or the new one, whole.

    Raises:
        ArgumentError: where it cannot be written.
    """
    write_file(path, encode_document(document(report)), what="report", fail=_refuse)


def _refuse(reason: str, *, place: str = "", source: str = "") -> ArgumentError:
    return ArgumentError(": ".join(filter(None, (source, place, reason))))


def table(checks: Iterable[Check]) -> list[tuple[str, str, str, str]]:
    """Return rows for people: what, where, whether it is well, and what is to be said."""
    words = {True: "ok", False: "WRONG", None: "–"}
    return [(each.name, each.device or "", words[each.ok], each.detail) for each in checks]
