"""Recording the zoo again: which changes count, and that our own engine has none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.zoo.follow import Move, moves, options_of, record_again
from tests.zoo.pack import read_document
from tests.zoo.record import Engine

_CASE: dict[str, Any] = {
    "name": "two-devices",
    "stand_ins": "rpc",
    "load": "no_alloc",
    "n_ctx": 256,
    "device_order": [0, 1],
    "pipeline": True,
    "host": [100, 0, 30, 0],
    "devices": {"0": [200, 50, 60], "1": [300, 50, 60]},
    "output": ["CPU output buffer size = 0.00 MiB"],
}
_NAME = "rpc no_alloc two-devices"


def test_the_same_numbers_have_not_moved() -> None:
    assert moves(_CASE, dict(_CASE)) == []


def test_every_number_that_moved_is_told_with_device_and_part() -> None:
    after = {**_CASE, "host": [100, 0, 31, 0], "devices": {"0": [200, 50, 60], "1": [300, 40, 60]}}
    assert moves(_CASE, after) == [Move(_NAME, "1 state", 50, 40), Move(_NAME, "host compute", 30, 31)]


def test_a_device_that_came_or_went_has_moved_from_or_to_nothing() -> None:
    after = {**_CASE, "devices": {"0": [200, 50, 60]}}
    assert [(move.what, move.after) for move in moves(_CASE, after)] == [
        ("1 weights", 0),
        ("1 state", 0),
        ("1 compute", 0),
    ]


def test_pipelines_that_came_or_went_are_told() -> None:
    assert moves(_CASE, {**_CASE, "pipeline": False}) == [Move(_NAME, "pipeline", "True", "False")]


def test_a_refusal_that_came_is_told_and_one_worded_anew_is_not() -> None:
    asked = {key: _CASE[key] for key in ("name", "stand_ins", "load")}
    refused = {**asked, "error": "model not loaded", "reason": ["no such thing"]}
    assert moves(_CASE, refused) == [Move(_NAME, "refused", None, "model not loaded no such thing")]
    assert moves(refused, {**refused, "reason": ["other words"]}) == []


def test_our_own_engine_moves_nothing(tmp_path: Path) -> None:
    asked = [case for case in read_document("falcon-dense")["cases"] if case["stand_ins"] == "rpc"]
    pairs = list(record_again("falcon-dense", Engine(Path(sys.executable)), tmp_path))
    assert [options_of(before) for before, _ in pairs] == [options_of(case) for case in asked]
    assert [move for before, after in pairs for move in moves(before, after)] == []
    assert list(tmp_path.iterdir()) == []
