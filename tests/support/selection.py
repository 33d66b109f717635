"""How much a run does: everything with --all, else a part that touches every kind of thing; and on how many cores.

Two means make a long test shorter in the everyday run: the marker `exhaustive` leaves it out, `some` and `examples` let
it look at fewer cases. Neither loosens what is asserted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

EXHAUSTIVE = "exhaustive"
SHARE = 4
"""One in so many cases is looked at in the everyday run."""
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


def some(cases: Sequence[T], least: int = 3) -> list[T]:
    """Return all cases in the long run, else one in `SHARE`, spread evenly; `least` where there are so many."""
    if _Run.does_all:
        return list(cases)
    count = min(len(cases), max(least, -(-len(cases) // SHARE)))
    return [cases[index * len(cases) // count] for index in range(count)]


def left_out(items: Iterable[pytest.Item], asked_for: Iterable[str]) -> list[pytest.Item]:
    """Return the exhaustive ones of `items` that are not among the node ids `asked_for`."""
    named = [argument for argument in asked_for if "::" in argument]
    return [item for item in items if item.get_closest_marker(EXHAUSTIVE) and not _is_named(item.nodeid, named)]


def _is_named(node_id: str, named: Iterable[str]) -> bool:
    """Say whether an argument is `node_id` (from whatever folder it is seen), or that of all its parameters."""
    return any(f"/{name}".endswith((f"/{node_id}", f"/{node_id.partition('[')[0]}")) for name in named)


def worker_count(arguments: Iterable[str], cores: int) -> int:
    """Return how many workers run the tests in `arguments` (files, folders, node ids); 0: this process does."""
    files = {argument.partition("::")[0] for argument in arguments}
    is_small = len(files) < FILES_WORTH_WORKERS and all(name.endswith(".py") for name in files)
    return 0 if is_small or cores < 2 else cores
