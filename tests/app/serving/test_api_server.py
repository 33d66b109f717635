"""The keys of the window's API server."""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PySide6.QtGui import QGuiApplication
from pytestqt.qtbot import QtBot

from app.paths import api_key_path
from app.serving import api_server
from app.serving.api_server import ServerPhase
from engine.base.errors import ArgumentError
from tests.support.patience import DEADLINE_S
from tests.support.ports import free_port
from tests.support.served_window import Bench, served_window
from tests.support.windows import WindowOpener


@pytest.fixture
def bench(open_window: WindowOpener, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with served_window(open_window, qtbot, tmp_path, monkeypatch) as found:
        yield found


def test_a_key_that_cannot_be_read_changes_nothing_of_a_start(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def unreadable() -> str:
        raise ArgumentError("The key cannot be read.")

    monkeypatch.setattr("app.serving.api_server._import_server", lambda: go_on.wait(DEADLINE_S))
    monkeypatch.setattr("app.serving.api_server._read_key", unreadable)
    server, pane = bench.desk.server, bench.pane
    pane.port_box.setValue(free_port())
    pane.key_box.click()
    pane.switch_button.click()
    pane.copy_key_button.click()
    bench.wait(lambda: bool(server.state.fault))
    assert server.state.phase is ServerPhase.BUSY
    go_on.set()
    bench.wait(lambda: server.state.phase is ServerPhase.ON)


def test_a_new_key_refuses_programs_with_the_old_one(bench: Bench) -> None:
    bench.load(bench.file("ada"))
    pane = bench.start()
    old = bench.client()
    bench.say_hello("ada", bench.client())
    path = api_key_path()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().strip() == old.api_key
    pane.copy_key_button.click()
    assert QGuiApplication.clipboard().text() == old.api_key
    pane.new_key_button.click()
    bench.wait(lambda: bench.desk.server.state.key not in ("", old.api_key))
    bench.wait(lambda: bench.desk.server.state.phase is ServerPhase.ON)
    with pytest.raises(openai.AuthenticationError):
        bench.say_hello("ada", old)
    assert bench.say_hello("ada") == "ada"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().strip() == bench.desk.server.state.key


def test_each_key_of_the_file_is_accepted(bench: Bench) -> None:
    bench.load(bench.file("ada"))
    keys = ["first-key-0123456789", "second-key-0123456789"]
    api_key_path().write_text("\n".join(keys), encoding="ascii")
    bench.start()
    bench.wait(lambda: bench.desk.server.state.key == keys[0])
    for key in keys:
        client = openai.OpenAI(base_url=f"{bench.desk.server.state.url}/v1", api_key=key, max_retries=0)
        assert bench.say_hello("ada", client) == "ada"


def test_a_key_that_is_replaced_while_the_server_starts_is_the_servers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.load(bench.file("ada"))
    server = bench.desk.server
    server.show_key()
    bench.wait(lambda: bool(server.state.key))
    old, is_read, is_replaced = server.state.key, threading.Event(), threading.Event()
    make_server, new_key = api_server._make_server, api_server._new_key

    def make_later(*arguments: Any) -> Any:
        is_read.set()
        assert is_replaced.wait(DEADLINE_S)
        return make_server(*arguments)

    def replace_later() -> str:
        assert is_read.wait(DEADLINE_S)
        return new_key()

    monkeypatch.setattr(api_server, "_make_server", make_later)
    monkeypatch.setattr(api_server, "_new_key", replace_later)
    server.state_changed.connect(lambda state: is_replaced.set() if state.key != old else None)
    server.renew_key()
    bench.start()
    assert server.state.key != old
    assert bench.say_hello("ada") == "ada"
