"""The tests that a run selects, and the number of its test workers."""

from __future__ import annotations

import pytest

from tests.support import selection


@pytest.fixture(autouse=True)
def begun_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the mode of the everyday run for a test, and restore the real mode."""
    monkeypatch.setattr(selection._Run, "does_all", False)


@pytest.mark.parametrize(("count", "short"), [(600, 100), (60, 10), (20, 10), (7, 7), (1, 1)])
def test_short_run_tries_fewer_examples(count: int, short: int) -> None:
    assert selection.examples(count) == short
    selection.begin_run(does_all=True)
    assert selection.examples(count) == count


def test_short_run_looks_at_a_part_that_is_spread_over_all() -> None:
    assert selection.some(range(24)) == [0, 6, 12, 18]
    assert selection.some(range(5)) == [0, 2]
    assert selection.some("ab") == ["a", "b"]
    assert selection.some("") == []
    assert selection.some(range(8), least=8) == list(range(8))
    selection.begin_run(does_all=True)
    assert selection.some(range(16)) == list(range(16))


@pytest.fixture
def items(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """Return two tests, the second of them marked as exhaustive."""
    session = request.session
    parent = request.node.parent

    def item(name: str) -> pytest.Item:
        return pytest.Function.from_parent(parent, name=name, callobj=lambda: session)

    short, long = item("test_short"), item("test_long[a]")
    long.add_marker(selection.EXHAUSTIVE)
    return [short, long]


@pytest.mark.parametrize("asked_for", [[], ["tests"], ["tests/support/test_selection.py"], ["x.py::test_long"]])
def test_long_tests_are_left_out(items: list[pytest.Item], asked_for: list[str]) -> None:
    assert [item.name for item in selection.left_out(items, asked_for)] == ["test_long[a]"]


@pytest.mark.parametrize("name", ["test_long", "test_long[a]"])
def test_long_test_that_is_named_itself_runs(items: list[pytest.Item], name: str) -> None:
    node_id = f"tests/support/test_selection.py::{name}"
    assert selection.left_out(items, [node_id]) == []
    assert selection.left_out(items, [f"/elsewhere/project/{node_id}"]) == []


def test_of_many_long_cases_some_are_run_unless_the_test_is_named() -> None:
    def run(file: str, count: int, asked_for: list[str]) -> list[int]:
        cases = [f"{file}::test_it[{number}]" for number in range(count)]
        spare = selection.spare_cases(cases, asked_for)
        return [number for number, case in enumerate(cases) if case not in spare]

    long = "tests/hardening/test_a.py"
    assert run(long, 24, ["tests"]) == [0, 6, 12, 18]
    assert run(long, 24, [f"{long}::test_it"]) == list(range(24))
    assert run(long, 2, []) == run(long, 1, []) == [0]
    assert run("tests/engine/model/gguf/test_a.py", 16, []) == list(range(16))


@pytest.mark.parametrize(
    ("arguments", "cores", "workers"),
    [
        (["tests"], 8, 12),
        (["tests"], 2, 3),
        (["tests"], 1, 0),
        (["tests/test_make.py"], 8, 0),
        (["tests/test_make.py::test_a", "tests/test_make.py::test_b", "tests/test_make.py::test_c"], 8, 0),
        (["tests/test_a.py", "tests/test_b.py", "tests/test_c.py"], 8, 12),
        (["tests/test_a.py", "tests/engine"], 8, 12),
    ],
)
def test_workers_are_started_where_they_are_worth_it(arguments: list[str], cores: int, workers: int) -> None:
    assert selection.worker_count(arguments, cores) == workers
