"""`layerdeck-cli doctor` with stand-ins for its checks: document, table, file and exit codes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from app.cli import doctor
from app.packs import find_all_devices
from engine.base.confinement import TABLE
from engine.devices.device import Rig
from engine.machines.doctor.machine import MachineSteps
from engine.machines.doctor.report import Check, Progress, Step
from tests.support.command_line import Terminal, run_here
from tests.support.previews import make_gpu

GOOD = Check(name="load", device="CPU", detail="loads and answers", figures={"tokens_per_second": 12.5})
BAD = Check(name="weights", device="CPU", ok=False, detail="It dies.")


def use_steps(monkeypatch: pytest.MonkeyPatch, *checks: Check, interrupt: bool = False) -> None:
    def look() -> Iterator[Check]:
        for check in checks:
            if interrupt:
                os.kill(os.getpid(), signal.SIGINT)
            yield check

    steps = [Step("made up", "Looking", look), Step("second", "Looking again", lambda: [GOOD])]
    monkeypatch.setattr(MachineSteps, "steps", lambda _machine: steps)
    monkeypatch.setattr(MachineSteps, "engine_steps", lambda _machine: steps[:1])


def find_card(verdicts: Path, rpc_endpoints: Sequence[str] = (), **others: object) -> Rig:
    """Search as the program does, on a machine that has a card besides."""
    found = find_all_devices(verdicts, rpc_endpoints, **others)  # type: ignore[arg-type]
    return Rig((make_gpu("CUDA0", 8), *found.devices), found.host)


def test_the_document_is_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use_steps(monkeypatch, GOOD)
    out = tmp_path / "report.json"
    answer = run_here(capsys, "doctor", "--json", "--out", out)
    assert answer.code == 0
    assert answer.document == json.loads(out.read_text(encoding="utf-8"))
    assert answer.document["is_whole"]
    assert (
        answer.document["checks"]
        == [
            {
                "name": "load",
                "device": "CPU",
                "ok": True,
                "detail": "loads and answers",
                "figures": {"tokens_per_second": 12.5},
            }
        ]
        * 2
    )


def test_what_is_wrong_is_told_in_a_table_without_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_steps(monkeypatch, msgspec.structs.replace(BAD, detail=f"It dies. See {Path.home()}/log."))
    answer = run_here(capsys, "doctor", "--engine")
    assert answer.code == 5
    assert "weights  CPU  WRONG  It dies. See ~/log." in answer.out
    assert "1 of 1 checks failed: CPU weights." in answer.out


def test_an_interrupt_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    use_steps(monkeypatch, GOOD, BAD, interrupt=True)
    answer = run_here(capsys, "doctor", "--json")
    assert answer.code == 130
    assert not answer.document["is_whole"]
    assert [check["name"] for check in answer.document["checks"]] == ["load"]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_of_the_search_for_devices_leaves_an_empty_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(*_rest: object) -> Rig:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the search went on")

    monkeypatch.setattr(doctor, "find_machine", find)
    answer = run_here(capsys, "doctor", "--json")
    assert (answer.code, answer.document["is_whole"], answer.document["checks"]) == (130, False, [])


def test_a_worker_that_does_not_answer_is_told_and_the_rest_examined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(MachineSteps, "_devices", ())
    monkeypatch.setattr(MachineSteps, "_speeds", lambda _machine: [])
    monkeypatch.setattr("app.cli.devices.find_all_devices", find_card)
    answer = run_here(capsys, "doctor", "--rpc", "127.0.0.1:1", "--json")
    checks = answer.document["checks"]
    (wrong,) = [check for check in checks if check["name"] == "devices"]
    assert wrong["ok"] is False
    assert "127.0.0.1" not in answer.out, "who is asked is nobody's business"
    assert "asked-0" in wrong["detail"]
    assert [check["device"] for check in checks if check["name"] == "device"] == ["CUDA0", "CPU"]


def test_the_engines_check_alone_tells_of_a_worker_that_does_not_answer_as_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(MachineSteps, "_devices", ())
    answer = run_here(capsys, "doctor", "--engine", "--rpc", "127.0.0.1:1", "--json")
    assert answer.code == 5
    assert [check["name"] for check in answer.document["checks"]] == ["devices"]
    assert "asked-0" in answer.document["checks"][0]["detail"]
    answer = run_here(capsys, "doctor", "--engine", "--peer", "maria's attic", "--json")
    assert [check["name"] for check in answer.document["checks"]] == ["devices"]
    assert "maria" not in answer.out


def test_a_file_that_cannot_be_written_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    never = Step("never", "Never", lambda: pytest.fail("it was examined"))
    monkeypatch.setattr(MachineSteps, "steps", lambda _machine: [never])
    answer = run_here(capsys, "doctor", "--json", "--out", tmp_path / "no" / "folder.json")
    assert answer.code == 2
    assert answer.error["kind"] == "argument"


def test_a_file_that_cannot_be_written_in_the_end_costs_no_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "report.json"

    def look() -> Iterator[Check]:
        # The place is gone after the check of the options.
        out.mkdir()
        yield GOOD

    monkeypatch.setattr(MachineSteps, "steps", lambda _machine: [Step("made up", "Looking", look)])
    answer = run_here(capsys, "doctor", "--json", "--out", out)
    assert answer.code == 2
    assert [check["name"] for check in answer.document["checks"]] == ["load"]
    assert "report.json" in answer.err


def test_progress_is_one_line_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    doctor._show(Progress(0, 2, "Looking", ()))
    doctor._clear()
    assert terminal.getvalue() == "\r\x1b[KLooking (1 of 2)\r\x1b[K"


def test_it_prints_what_each_kind_of_child_can_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_steps(monkeypatch, GOOD)
    lines = run_here(capsys, "doctor").out.splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("child "))
    assert [line.split()[0] for line in lines[head + 1 : head + 1 + len(TABLE)]] == [each.name for each in TABLE]
    (download,) = [line for line in lines if line.startswith("download ")]
    assert "to any" in download
    rights = run_here(capsys, "doctor", "--json").document["rights"]
    assert {each["child"]: each["secrets"] for each in rights} == {each.name: "no" for each in TABLE}
