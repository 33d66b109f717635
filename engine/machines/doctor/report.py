"""An examination runs step by step; its results are values: checks, and the report file that people send.

A failing step costs only its own results, and a cancel keeps those of the steps before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.base.cancellation import CancelToken
from engine.base.confinement import TABLE, cells
from engine.base.errors import ArgumentError, EngineError
from engine.base.json_file import encode_document, write_file


@dataclass(frozen=True, slots=True)
class Step:
    """A step. `words`: the current action, for people. `look` yields checks and may raise `EngineError`."""

    name: str
    words: str
    look: Callable[[], Iterable[Check]]
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress: `done` of `total` steps are complete. `words`: the current action. `checks`: the results so far."""

    done: int
    total: int
    words: str
    checks: tuple[Check, ...]


def examine(steps: Sequence[Step], tell: Callable[[Progress], None], cancel: CancelToken) -> Report:
    """Run all steps in the calling thread; return the results until the end or the cancel."""
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
            # After a cancel the error is the cancel's own.
            if not cancel.cancelled:
                checks.append(Check(name=step.name, device=step.device, ok=None, detail=error.summary()))
    tell(Progress(len(steps), len(steps), "", tuple(checks)))
    return Report(tuple(checks), is_whole=not cancel.cancelled)


Figure = int | float | str | bool | None


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One result. `ok`: None if it could not be determined. `figures`: numbers, with their unit in the name."""

    name: str
    device: str | None = None
    ok: bool | None = True
    detail: str = ""
    figures: dict[str, Figure] = {}


class Report(msgspec.Struct, frozen=True):
    """All checks in their order. `is_whole`: False if the examination was cancelled."""

    checks: tuple[Check, ...] = ()
    is_whole: bool = True

    @property
    def is_sound(self) -> bool:
        """Whether no check failed."""
        return all(check.ok is not False for check in self.checks)

    @property
    def summary(self) -> str:
        """The result in one sentence."""
        wrong = [check for check in self.checks if check.ok is False]
        end = "" if self.is_whole else " It was cancelled before its end."
        if not wrong:
            return f"Nothing wrong was found in {len(self.checks)} checks.{end}"
        names = ", ".join(dict.fromkeys(" ".join(filter(None, (each.device, each.name))) for each in wrong))
        return f"{len(wrong)} of {len(self.checks)} checks failed: {names}.{end}"


def document(report: Report) -> dict[str, object]:
    """Return the JSON document of the report."""
    return {
        "version": 1,
        "is_whole": report.is_whole,
        "checks": [msgspec.to_builtins(each) for each in report.checks],
        "rights": [cells(each) for each in TABLE],
    }


def without_names(report: Report, names: Mapping[str, str]) -> Report:
    """Return the report with each personal name in `names` replaced by its value, in all texts."""
    # `re` takes the first alternative that matches, so host:port has to come before its host.
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
    """Write the report file atomically.

    Raises:
        ArgumentError: if it cannot be written.
    """
    write_file(path, encode_document(document(report)), what="report", fail=_refuse)


def _refuse(reason: str, *, place: str = "", source: str = "") -> ArgumentError:
    return ArgumentError(": ".join(filter(None, (source, place, reason))))


def table(checks: Iterable[Check]) -> list[tuple[str, str, str, str]]:
    """Return table rows: check, device, result, details."""
    words = {True: "ok", False: "WRONG", None: "–"}
    return [(each.name, each.device or "", words[each.ok], each.detail) for each in checks]
