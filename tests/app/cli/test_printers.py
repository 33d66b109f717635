"""The output of a load on a terminal, and in a pipe."""

from __future__ import annotations

import io
import json
import sys

import msgspec
import pytest

from app.chats.shown_messages import answer_note
from app.cli.chat_printers import JsonChat, TextChat
from app.cli.printers import JsonPrinter, TextPrinter
from engine.base.units import MIB
from engine.chat.message import Message
from engine.devices.device import make_host
from engine.devices.telemetry.sample import MemoryHolder
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.plan.report import DeviceRow, make_row
from engine.runtime.session.events import (
    AnyEvent,
    Attempt,
    Cancelled,
    Done,
    Failed,
    Fallback,
    Loaded,
    OutOfMemory,
    Progress,
    Token,
)
from tests.support.command_line import Terminal

DONE = Done(
    prompt_tokens=2,
    generated_tokens=2,
    prompt_tokens_per_second=50.0,
    generation_tokens_per_second=12.34,
    stop_reason="length",
)


def row(need_bytes: int, grade: Grade) -> DeviceRow:
    return make_row(make_host("host", 64 * MIB, 64 * MIB), DeviceMemory(weights_bytes=need_bytes), grade)


LOAD: list[AnyEvent] = [
    Progress(stage="header"),
    Progress(stage="read", fraction=0.0),
    Progress(stage="read", fraction=0.5, device="CPU"),
    Progress(stage="warm_up", fraction=1.0),
    Loaded(devices=(row(3 * MIB, Grade.MEASURED),), forecast=(row(2 * MIB, Grade.ESTIMATED),)),
    Token(text="He"),
    Token(text="llo"),
    DONE,
]


def test_off_a_terminal_each_stage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    printer = TextPrinter()
    for event in LOAD:
        printer.show(event)
    out, err = capsys.readouterr()
    assert out == "Hello\n"
    assert err.splitlines() == [
        "header",
        "read",
        "warm up",
        "loaded",
        "  CPU: 3.0 MiB (forecast 2.0 MiB)",
        "prompt 50.0 tokens/s, generation 12.3 tokens/s",
    ]


def test_on_a_terminal_one_line_is_kept_up_to_date(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    printer = TextPrinter()
    for event in LOAD:
        printer.show(event)
    clear = "\r\x1b[K"
    assert terminal.getvalue().startswith(
        f"{clear}header{clear}read 0%{clear}read 50% on CPU{clear}warm up 100%{clear}loaded\n"
    )
    assert capsys.readouterr().out == "Hello\n"


def test_an_ending_amid_generated_text_begins_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    printer = TextPrinter()
    printer.show(Token(text="He"))
    printer.show(Failed(kind="unreachable", message="RPC0 was lost."))
    assert capsys.readouterr() == ("He\n", "layerdeck-cli: RPC0 was lost.\n")


def test_attempts_remedies_and_holders_in_text(capsys: pytest.CaptureFixture[str]) -> None:
    printer = TextPrinter()
    printer.show(Progress(stage="fit"))
    printer.show(
        Attempt(
            number=2,
            layout="layers 0-3 on CPU",
            reason="CUDA0 could not allocate 2.0 MiB. Change for the next attempt: all.",
        )
    )
    printer.show(Progress(stage="fit"))
    holders = (MemoryHolder(pid=7, name="browser", held_bytes=3 * MIB), MemoryHolder(pid=8, name="python", ours=True))
    printer.show(
        OutOfMemory(
            stage="context", device="CUDA0", requested_bytes=2 * MIB, free_bytes=None, allocated=(),
            proposals=("Shorten the context to 256",), message="CUDA0 ran out of memory.", holders=holders,
        )
    )  # fmt: skip
    assert capsys.readouterr().err.splitlines() == [
        "fit",
        "attempt 2: layers 0-3 on CPU",
        "  CUDA0 could not allocate 2.0 MiB. Change for the next attempt: all.",
        "fit",
        "layerdeck-cli: CUDA0 ran out of memory.",
        "Memory of CUDA0 is used by:",
        "  browser (7) 3.0 MiB",
        "  python (8) an unknown amount, this program",
        "What should fit:",
        "  Shorten the context to 256",
    ]


def test_a_fallback_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    event = Fallback(message="The load is tried again without it.")
    TextPrinter().show(event)
    assert capsys.readouterr().err == "layerdeck-cli: The load is tried again without it.\n"
    printer = JsonPrinter()
    printer.child_started()
    printer.show(event)
    assert json.loads(capsys.readouterr().out) == {"event": "fallback", "message": event.message}


def test_json_attempts_are_held_back_with_the_progress(capsys: pytest.CaptureFixture[str]) -> None:
    printer = JsonPrinter()
    printer.show(Progress(stage="fit"))
    printer.show(Attempt(number=1, layout="layers 0-3 on CPU", reason="As asked for."))
    assert capsys.readouterr().out == ""
    printer.show(Cancelled(stage="fit"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == '{"event":"attempt","number":1,"layout":"layers 0-3 on CPU","reason":"As asked for."}'
    assert [json.loads(line)["event"] for line in lines] == ["progress", "attempt", "cancelled"]


def test_json_progress_is_held_back_until_the_child_has_started(capsys: pytest.CaptureFixture[str]) -> None:
    printer = JsonPrinter()
    printer.show(Progress(stage="header"))
    printer.show(Progress(stage="fit"))
    assert capsys.readouterr().out == ""
    printer.child_started()
    printer.show(Failed(kind="model_file", message="x.gguf: no"))
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["progress", "progress", "failed"]
    assert events[2] == {"event": "failed", "kind": "model_file", "message": "x.gguf: no"}


def test_json_failure_before_the_child_is_the_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    printer = JsonPrinter()
    printer.show(Progress(stage="header"))
    printer.show(Failed(kind="busy", message="RPC0: in use."))
    assert json.loads(capsys.readouterr().out) == {"error": {"kind": "busy", "message": "RPC0: in use."}}


def test_json_cancel_before_the_child_is_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    printer = JsonPrinter()
    printer.show(Progress(stage="header"))
    printer.show(Cancelled(stage="header"))
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["progress", "cancelled"]
    assert lines[-1] == '{"event":"cancelled","stage":"header"}'


def test_a_model_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for output, expected in ((Terminal(), "a\n\tb\\x1bé\\x9b]0;x\\x07"), (io.StringIO(), "a\n\tb\x1bé\x9b]0;x\x07")):
        monkeypatch.setattr(sys, "stdout", output)
        printer = TextPrinter()
        printer.show(Token(text="a\n\tb\x1bé"))
        printer.show(Token(text="\x9b]0;x\x07"))
        assert output.getvalue() == expected


def test_an_answer_cannot_steer_the_terminal_if_standard_error_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for output, expected in ((Terminal(), "a\\x1b[2J"), (io.StringIO(), "a\x1b[2J")):
        error = io.StringIO()
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "stderr", error)
        TextChat().print_delta("reasoning", "a\x1b[2J")
        assert (output.getvalue(), error.getvalue()) == (expected, "")


def test_an_endless_repetition_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Message(id="1", role="assistant", content="ha ha", stop_reason="repetition")
    TextChat().done(msgspec.structs.replace(DONE, stop_reason="repetition"), answer)
    assert "kept repeating itself. --repeat-penalty 1.1" in capsys.readouterr().err
    TextChat().done(DONE, answer)
    assert "repeating itself" not in capsys.readouterr().err
    JsonChat().done(msgspec.structs.replace(DONE, stop_reason="repetition"), answer)
    assert json.loads(capsys.readouterr().out)["stop_reason"] == "repetition"
    assert "kept repeating itself" in answer_note(answer)
