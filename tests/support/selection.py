"""How much a run does: everything with --all, else a part that touches every kind of thing; and on how many cores.

Three means make a long test shorter in the everyday run: the marker `exhaustive` leaves it out, `some` and `examples`
let it look at fewer cases, and in `LONG_FOLDERS` a test of many cases is run with some of them. None loosens what is
asserted, and every test that has no such marker is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

EXHAUSTIVE = "exhaustive"
SHARE = 6
"""One in so many cases is looked at in the everyday run."""
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
"""Where a case takes a process, a load or the forecasts of a whole model."""
MOST_CASES = 2
"""A test with more cases than this, in those folders, is run with some of them."""
BUNDLE_VARIABLE = "LAYERDECK_TESTED_BUNDLE"
"""Names the folder of a bundle, whose command line is then the one that tests start as a process of its own."""
FILES_WORTH_WORKERS = 3
"""A run of fewer test files than this is over before a second worker has begun."""


class _Run:
    """The run under way; test modules read it while they are imported."""

    does_all = False


def begin_run(*, does_all: bool) -> None:
    """Note what is wanted, before any test module is imported."""
    _Run.does_all = does_all


def examples(count: int) -> int:
    """Return how many examples a property with `count` of them in the long run is to be tried with."""
    return count if _Run.does_all else max(count // SHARE, min(count, 10))


def some(cases: Sequence[T], least: int = MOST_CASES) -> list[T]:
    """Return all cases in the long run, else one in `SHARE`, spread evenly; `least` where there are so many."""
    if _Run.does_all:
        return list(cases)
    count = min(len(cases), max(least, -(-len(cases) // SHARE)))
    return [cases[index * len(cases) // count] for index in range(count)]


def left_out(items: Iterable[pytest.Item], asked_for: Iterable[str]) -> list[pytest.Item]:
    """Return the exhaustive ones of `items` that are not among the node ids `asked_for`."""
    named = [argument for argument in asked_for if "::" in argument]
    return [item for item in items if item.get_closest_marker(EXHAUSTIVE) and not _is_named(item.nodeid, named)]


def spare_cases(node_ids: Iterable[str], asked_for: Iterable[str]) -> set[str]:
    """Return the cases that a short run leaves out, of tests in `LONG_FOLDERS` that are not among `asked_for`."""
    named = [argument for argument in asked_for if "::" in argument]
    cases: dict[str, list[str]] = {}
    for node_id in node_ids:
        if node_id.startswith(LONG_FOLDERS) and not _is_named(node_id, named):
            cases.setdefault(node_id.partition("[")[0], []).append(node_id)
    return {each for alike in cases.values() if len(alike) > MOST_CASES for each in set(alike).difference(some(alike))}


def _is_named(node_id: str, named: Iterable[str]) -> bool:
    """Say whether an argument is `node_id` (from whatever folder it is seen), or that of all its parameters."""
    return any(f"/{name}".endswith((f"/{node_id}", f"/{node_id.partition('[')[0]}")) for name in named)


def worker_count(arguments: Iterable[str], cores: int) -> int:
    """Return how many workers run the tests in `arguments` (files, folders, node ids); 0: this process does.

    Three for two cores: workers wait for children and time limits for a third of their time.
    """
    files = {argument.partition("::")[0] for argument in arguments}
    is_small = len(files) < FILES_WORTH_WORKERS and all(name.endswith(".py") for name in files)
    return 0 if is_small or cores < 2 else cores + cores // 2
