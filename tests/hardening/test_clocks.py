"""The clock of the system is set, or jumps: durations never come from it, whatever it says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_CLOCKS = ("time.time(", "datetime.now(", "now_ms(", "currentDateTime(", "currentMSecsSinceEpoch(")
AGES = {
    "app/chats/archive.py": "how long ago a conversation was deleted, by its entry",
    "engine/chat/copies.py": "age of a file that a killed process left",
    "engine/chat/saved_kv_states.py": "age of a file that a killed process left",
    "engine/library/hub/web.py": "a date in Retry-After, from 0 to a limit",
}
"""Where a time of the system is subtracted, and why: the other time comes from a file, or from another machine."""


def _subtractions(path: Path) -> Iterator[ast.BinOp]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            yield node


def test_no_duration_comes_from_a_clock_that_can_be_set() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("app", "engine", "widgets")
        for path in (ROOT / folder).rglob("*.py")
        if any(clock in path.read_text(encoding="utf-8") for clock in _CLOCKS)
        for node in _subtractions(path)
        if any(clock in ast.unparse(node) for clock in _CLOCKS)
    }
    assert found == set(AGES)
