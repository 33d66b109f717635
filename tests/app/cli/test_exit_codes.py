"""Exit codes by kind of error, and the output of an unexpected exception."""

from __future__ import annotations

import pytest

from app.cli import inspect
from app.cli.exit_codes import exit_code
from tests.support.command_line import run_here


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("argument", 2),
        ("layout", 2),
        ("rig", 2),
        ("storage", 2),
        ("changed", 2),
        ("does_not_fit", 3),
        ("model_file", 4),
        ("crashed", 5),
        ("stalled", 5),
        ("unreachable", 6),
        ("busy", 6),
        ("cancelled", 130),
        ("internal", 1),
    ],
)
def test_each_kind_has_its_code(kind: str, code: int) -> None:
    assert exit_code(kind) == code


def test_a_bug_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: object) -> int:
        raise RuntimeError("odd")

    monkeypatch.setattr(inspect, "run_inspect", fail)
    answer = run_here(capsys, "inspect", "x.gguf", "--json")
    assert answer.code == 1
    assert answer.error == {"kind": "internal", "message": "A bug in Layerdeck: RuntimeError('odd')"}
    assert "Traceback" in answer.err
    assert run_here(capsys, "inspect", "x.gguf").out == ""


def test_an_interrupt_of_a_command_that_has_no_ending(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "read_model", interrupted)
    answer = run_here(capsys, "inspect", "x.gguf", "--json")
    assert (answer.code, answer.out, answer.err) == (130, "", "")
