"""The output of `serve`: one line for each request, whatever text it contains, and no wait for a slow reader."""

from __future__ import annotations

import json
import threading

import pytest

from app.cli import serve_log
from app.cli.serve_log import MAX_LINES, ServeLog
from engine.api.server.journal import RequestEntry

FORGED = "/v1/x\n127.0.0.1 /v1/chat/completions other 200 0.00 s\x1b[2J"


def entry(path: str = "/v1/x") -> RequestEntry:
    return RequestEntry(1, 0.0, "127.0.0.1", path, f"model\r\n{path}", 404, duration_s=0.5)


def test_a_path_with_line_breaks_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    log = ServeLog(as_json=False)
    log.request(entry(FORGED))
    log.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("127.0.0.1 /v1/x\\n127.0.0.1")
    assert "\x1b" not in line


def test_an_event_with_line_breaks_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    log = ServeLog(as_json=True)
    log.request(entry(FORGED))
    log.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["path"].startswith("/v1/x\n127.0.0.1")


def test_a_reader_that_does_not_read_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, printed = threading.Event(), list[str]()

    def slow(sentence: str) -> None:
        may_write.wait()
        printed.append(sentence)

    monkeypatch.setattr(serve_log, "print_stderr", slow)
    monkeypatch.setattr(serve_log, "print_notice", slow)
    log = ServeLog(as_json=False)
    for _ in range(MAX_LINES + 50):
        log.request(entry())
    may_write.set()
    log.close()
    assert MAX_LINES <= len(printed) <= MAX_LINES + 2
    assert "lines were left out" in printed[-1]


def test_requests_under_way_and_questions_about_health_are_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    log = ServeLog(as_json=False)
    log.request(RequestEntry(1, 0.0, "", "/v1/x"))
    log.request(entry("/health"))
    log.close()
    assert capsys.readouterr().err == ""


def test_a_reader_that_has_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def broken(line: str) -> None:
        calls.append(line)
        raise BrokenPipeError

    monkeypatch.setattr(serve_log, "print_line", broken)
    log = ServeLog(as_json=True)
    log.request(entry())
    log.request(entry())
    log.close()
    assert len(calls) == 2
