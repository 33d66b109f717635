"""Runs an examination of a machine step by step, and writes the report file that users send.

If a step fails, only its own results are missing. If the examination is cancelled, the results so far are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from engine.base.cancellation import CancelToken
from engine.base.confinement import TABLE, cells
from engine.base.errors import ArgumentError, EngineError
from engine.base.json_file import encode_document, write_file
from engine.base.values import replace


class Step(Struct, frozen=True):
    """A step of an examination.

    `words`: what the step does, for people.
    `look`: does the work and yields checks; may raise `EngineError`.
    `device`: id of the examined device; None if the step is about the whole machine.
    """

    name: str
    words: str
    look: Callable[[], Iterable[Check]]
    device: str | None = None


class Progress(Struct, frozen=True):
    """Progress of an examination: `done` of `total` steps are complete.

    `words`: current action, for people.
    `checks`: the results so far.
    """

    done: int
    total: int
    words: str
    checks: tuple[Check, ...]


def examine(steps: Sequence[Step], on_progress: Callable[[Progress], None], cancel: CancelToken) -> Report:
    """Run the steps of an examination in the calling thread, and return the results.

    If `cancel` is set, the examination ends early, and the report has the results so far.

    `on_progress`: called with the progress before each step and after each check.
    """
    checks: list[Check] = []
    for done, step in enumerate(steps):
        if cancel.cancelled:
            return Report(tuple(checks), is_whole=False)
        on_progress(Progress(done, len(steps), step.words, tuple(checks)))
        try:
            for check in step.look():
                checks.append(check)
                on_progress(Progress(done, len(steps), step.words, tuple(checks)))
                if cancel.cancelled:
                    break
        except EngineError as error:
            # After a cancel the error is the cancel's own.
            if not cancel.cancelled:
                checks.append(Check(name=step.name, device=step.device, ok=None, detail=error.summary()))
    on_progress(Progress(len(steps), len(steps), "", tuple(checks)))
    return Report(tuple(checks), is_whole=not cancel.cancelled)


Figure = int | float | str | bool | None


class Check(Struct, frozen=True, kw_only=True):
    """One result of an examination.

    `device`: id of the examined device; None if the check is about the whole machine.
    `ok`: whether the check passed, None if that could not be determined.
    `detail`: text for people.
    `figures`: measured values by name, with their unit in the name.
    """

    name: str
    device: str | None = None
    ok: bool | None = True
    detail: str = ""
    figures: dict[str, Figure] = {}


class Report(Struct, frozen=True):
    """All results of an examination, in the order of its steps. `is_whole`: False if the examination was cancelled
    before its end.
    """

    checks: tuple[Check, ...] = ()
    is_whole: bool = True

    @property
    def is_sound(self) -> bool:
        """Whether each check either passed or had no clear result."""
        return all(check.ok is not False for check in self.checks)

    @property
    def summary(self) -> str:
        """The result of the examination in one sentence."""
        wrong = [check for check in self.checks if check.ok is False]
        end = "" if self.is_whole else " It was cancelled before its end."
        if not wrong:
            return f"Nothing wrong was found in {len(self.checks)} checks.{end}"
        names = ", ".join(dict.fromkeys(" ".join(filter(None, (each.device, each.name))) for each in wrong))
        return f"{len(wrong)} of {len(self.checks)} checks failed: {names}.{end}"


def document(report: Report) -> dict[str, object]:
    """Return the content of the report file, for JSON."""
    return {
        "version": 1,
        "is_whole": report.is_whole,
        "checks": [msgspec.to_builtins(each) for each in report.checks],
        "rights": [cells(each) for each in TABLE],
    }


def without_names(report: Report, names: Mapping[str, str]) -> Report:
    """Return the report with personal names replaced in all texts. `names`: replacement by personal name."""
    # `re` takes the first alternative that matches, so host:port has to come before its host.
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    # A user called "root" or "cpu" is not to spoil other words.
    pattern = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in longest_first))

    def cleaned(text: str) -> str:
        return pattern.sub(lambda found: names[found.group()], text) if longest_first else text

    def checked(check: Check) -> Check:
        figures = {key: cleaned(value) if isinstance(value, str) else value for key, value in check.figures.items()}
        device = None if check.device is None else cleaned(check.device)
        return replace(check, device=device, detail=cleaned(check.detail), figures=figures)

    return replace(report, checks=tuple(map(checked, report.checks)))


def write_report(path: Path, report: Report) -> None:
    """Write the report file atomically.

    Raises:
        ArgumentError: if it cannot be written.
    """
    write_file(path, encode_document(document(report)), what="report", fail=_refuse)


def _refuse(reason: str, *, location: str = "", source: str = "") -> ArgumentError:
    return ArgumentError(": ".join(filter(None, (source, location, reason))))


def table(checks: Iterable[Check]) -> list[tuple[str, str, str, str]]:
    """Return the checks as rows of a table: check, device, result, details."""
    words = {True: "ok", False: "WRONG", None: "–"}
    return [(each.name, each.device or "", words[each.ok], each.detail) for each in checks]
