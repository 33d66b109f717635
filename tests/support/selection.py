"""Selects the tests of a run: all with `--all`, otherwise a part; and the number of test workers.

Three means shorten the everyday run. The marker `exhaustive` deselects a test. `some` and `examples` give a test fewer
cases. In `LONG_FOLDERS` a test with many cases runs with some of them. None of them loosens an assertion, and tests
without these always run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

EXHAUSTIVE = "exhaustive"
SHARE = 6
"""The everyday run takes one case in `SHARE`."""
LONG_FOLDERS = (
    "tests/app/cli/",
    "tests/app/window/test_auto_layout_menu.py",
    "tests/e2e/",
    "tests/engine/chat/test_damage.py",
    "tests/engine/chat/test_killed_writer.py",
    "tests/engine/machines/",
    "tests/engine/library/downloads/",
    "tests/engine/planning/exchange/test_python_script.py",
    "tests/engine/planning/fit/",
    "tests/engine/planning/layout/test_refused.py",
    "tests/engine/planning/memory/",
    "tests/engine/runtime/child/",
    "tests/engine/runtime/media/",
    "tests/engine/runtime/session/",
    "tests/hardening/",
    "tests/zoo/",
)
"""Folders in which each case needs a process, a load or the forecasts of a whole model."""
MOST_CASES = 1
"""In `LONG_FOLDERS` one case in `SHARE` of a test runs, but at least this many."""
BUNDLE_VARIABLE = "LAYERDECK_TESTED_BUNDLE"
"""Environment variable with the folder of a bundle. Tests then start that bundle's command line."""
FILES_WORTH_WORKERS = 3
"""A run with fewer test files than this ends before a second test worker has started."""


class _Run:
    """Mode of this test run. Test modules read it when they are imported."""

    does_all = False


def begin_run(*, does_all: bool) -> None:
    """Set the mode of this run, before any test module is imported."""
    _Run.does_all = does_all


def examples(count: int) -> int:
    """Return the number of hypothesis examples in this run for a test that has `count` with `--all`."""
    return count if _Run.does_all else max(count // SHARE, min(count, 10))


def some(cases: Sequence[T], least: int = 2) -> list[T]:
    """Return all cases with `--all`, otherwise one in `SHARE`, spread evenly, but at least `least`."""
    if _Run.does_all:
        return list(cases)
    count = min(len(cases), max(least, -(-len(cases) // SHARE)))
    return [cases[index * len(cases) // count] for index in range(count)]


def left_out(items: Iterable[pytest.Item], asked_for: Iterable[str]) -> list[pytest.Item]:
    """Return the items marked as exhaustive that are not named by a node id in `asked_for`."""
    named = [argument for argument in asked_for if "::" in argument]
    return [item for item in items if item.get_closest_marker(EXHAUSTIVE) and not _is_named(item.nodeid, named)]


def spare_cases(node_ids: Iterable[str], asked_for: Iterable[str]) -> set[str]:
    """Return the cases of tests in `LONG_FOLDERS` that the everyday run deselects.

    `asked_for`: arguments of pytest. Tests named by a node id are not deselected.
    """
    named = [argument for argument in asked_for if "::" in argument]
    cases: dict[str, list[str]] = {}
    for node_id in node_ids:
        if node_id.startswith(LONG_FOLDERS) and not _is_named(node_id, named):
            cases.setdefault(node_id.partition("[")[0], []).append(node_id)
    return {each for alike in cases.values() for each in set(alike).difference(some(alike, MOST_CASES))}


def _is_named(node_id: str, named: Iterable[str]) -> bool:
    """Return whether one of `named` is this node id, or the test of this case."""
    return any(f"/{name}".endswith((f"/{node_id}", f"/{node_id.partition('[')[0]}")) for name in named)


def worker_count(arguments: Iterable[str], cores: int) -> int:
    """Return the number of test workers for these arguments (files, folders, node ids); 0: no worker process.

    It is three for two cores, since workers spend a third of their time waiting for children and time limits.
    """
    files = {argument.partition("::")[0] for argument in arguments}
    is_small = len(files) < FILES_WORTH_WORKERS and all(name.endswith(".py") for name in files)
    return 0 if is_small or cores < 2 else cores + cores // 2
