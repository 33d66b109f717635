"""Exit codes by kind of error, and the output of an unexpected exception."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from app.cli import dispatch, inspect
from app.cli.exit_codes import exit_code
from tests.support.command_line import ROOT, program, run_here
from tests.support.patience import DEADLINE_S


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


@pytest.mark.parametrize(
    ("words", "closed", "code"),
    [
        (("inspect", "missing"), "2>&-", 4),
        (("packs",), ">&-", 0),
        (("packs", "install", "missing"), "<&- >&- 2>&-", 2),
        (("import", "-"), "<&-", 2),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="it needs a POSIX shell")
def test_a_closed_standard_stream_is_no_bug(words: tuple[str, ...], closed: str, code: int) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", *program(), *words],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == code, done
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (("load", "x.gguf"), {"event": "cancelled", "stage": "header"}),
        (("chat", "x.gguf"), {"event": "cancelled", "stage": "header"}),
        (("download", "a/b"), {"event": "cancelled", "stage": "fetch"}),
        (
            ("embed", "x.gguf", "text"),
            {"error": {"kind": "cancelled", "message": "Cancelled before the texts were embedded."}},
        ),
        (("chat", "--list"), None),
        (("plan", "x.gguf"), None),
    ],
)
def test_an_interrupt_during_the_imports_has_the_same_last_line(
    words: tuple[str, ...],
    last: dict[str, object] | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dispatch, "import_module", interrupted)
    answer = run_here(capsys, *words, "--json")
    assert (answer.code, json.loads(answer.out or "null"), answer.err) == (130, last, "")
    people = run_here(capsys, *words)
    assert (people.code, people.out) == (130, "")


def test_an_interrupt_of_the_imports_of_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dispatch, "import_module", interrupted)
    answer = run_here(capsys, "doctor", "--json")
    assert (answer.code, answer.document["is_whole"], answer.document["checks"]) == (130, False, [])


def test_an_interrupt_of_a_command_that_has_no_ending(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "read_model", interrupted)
    answer = run_here(capsys, "inspect", "x.gguf", "--json")
    assert (answer.code, answer.out, answer.err) == (130, "", "")
