"""Garbage collection during commands."""

from __future__ import annotations

import gc

import pytest

from app.allocator import rare_full_collections
from app.cli import dispatch


def test_full_collections_are_rare_in_the_context_only() -> None:
    before = gc.get_threshold()
    with rare_full_collections():
        assert gc.get_threshold()[2] > before[2]
    assert gc.get_threshold() == before


@pytest.mark.parametrize(("command", "is_rare"), [("plan", True), ("serve", False), ("inspect", False)])
def test_commands_that_run_long_keep_the_usual_thresholds(command: str, *, is_rare: bool) -> None:
    before = gc.get_threshold()
    with dispatch._collections(command):
        assert (gc.get_threshold() != before) == is_rare
