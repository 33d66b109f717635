"""Windows that ended without closing: reported once at the next start; running windows are not reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.run_records import EndedRun, OpenedModel, RunRecord, RunRecords
from engine.base.json_file import read_struct

CRASHING = """
import ctypes, os, signal, sys
from pathlib import Path
from app.run_records import OpenedModel, RunRecords

marks = RunRecords(Path(sys.argv[1]))
marks.begin()
marks.keep((OpenedModel("/models/secret-name.gguf", "{}"),), restored=False)
print("kept", flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
elif sys.argv[2] == "end":
    marks.end()
else:
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


def start(folder: Path, what: str) -> subprocess.Popen[str]:
    """Start a process that marks itself; return it once it has."""
    process = subprocess.Popen(
        [sys.executable, "-c", CRASHING, str(folder), what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "kept\n"
    return process


def finish(process: subprocess.Popen[str]) -> None:
    process.communicate()


@pytest.mark.parametrize(("signal", "words"), [("SIGSEGV", "Segmentation fault"), ("SIGKILL", "Python wrote nothing")])
def test_a_crash_is_told_once(tmp_path: Path, signal: str, words: str) -> None:
    finish(start(tmp_path, signal))
    marks = RunRecords(tmp_path)
    (ended,) = marks.take_ended()
    assert ended.mark.models == (OpenedModel("/models/secret-name.gguf", "{}"),)
    assert not ended.mark.restored
    assert words in ended.report
    assert "1 model" in ended.report
    assert "Layerdeck" in ended.report
    assert "secret" not in ended.report
    assert marks.take_ended() == ()
    assert list(tmp_path.iterdir()) == []


def test_who_runs_and_who_closed_is_left_alone(tmp_path: Path) -> None:
    finish(start(tmp_path, "end"))
    assert list(tmp_path.iterdir()) == []
    running = start(tmp_path, "wait")
    assert RunRecords(tmp_path).take_ended() == ()
    assert len(list(tmp_path.glob("*.json"))) == 1
    finish(running)


def test_of_two_windows_that_start_at_the_same_moment_one_takes_a_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(start(tmp_path, "SIGKILL"))
    taken: list[EndedRun] = []

    def read_while_another_starts(
        path: Path, kind: type[RunRecord], most_bytes: int, *, version: int | None
    ) -> RunRecord | None:
        mark = read_struct(path, kind, most_bytes, version=version)
        monkeypatch.setattr("app.run_records.read_struct", read_struct)
        taken.extend(RunRecords(tmp_path).take_ended())
        return mark

    monkeypatch.setattr("app.run_records.read_struct", read_while_another_starts)
    assert RunRecords(tmp_path).take_ended() == ()
    assert len(taken) == 1


def test_another_process_with_the_same_number_is_another_one(tmp_path: Path) -> None:
    mark = {"version": 1, "process": f"{os.getppid()}:1.00"}
    (tmp_path / "1.json").write_text(json.dumps(mark))
    assert [each.mark.models for each in RunRecords(tmp_path).take_ended()] == [()]


@pytest.mark.parametrize("text", ["", "[]", '{"version": 9, "process": "1:1"}', "x" * 100])
def test_a_mark_that_cannot_be_read_is_no_crash(tmp_path: Path, text: str) -> None:
    (tmp_path / "1.json").write_text(text)
    assert RunRecords(tmp_path).take_ended() == ()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_noted_after_the_end(tmp_path: Path) -> None:
    marks = RunRecords(tmp_path)
    marks.keep((), restored=False)
    marks.end()
    marks.keep((OpenedModel("a"),), restored=False)
    assert list(tmp_path.iterdir()) == []
    assert RunRecords(tmp_path / "missing").take_ended() == ()
