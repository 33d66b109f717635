"""Model > Serve: programs use the models that the window has loaded, and load others in it."""

from __future__ import annotations

import errno
import http.client
import json
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import openai
import psutil
import pytest
from PySide6.QtGui import QGuiApplication
from pytestqt.qtbot import QtBot

from app.models.open_model import OpenModel
from app.paths import api_key_path, serve_settings_path
from app.serving import api_server
from app.serving.api_server import ServerPhase
from app.window.serve_presenter import ServePresenter
from app.wiring import WindowParts
from engine.base.errors import ArgumentError
from engine.base.units import MIB
from engine.devices.device import CPU_ID
from engine.planning.fit.loaded_models import UNTIL_UNLOADED_S
from engine.planning.layout.layout import single_device
from engine.planning.layout.layout_file import parse_layout
from engine.planning.plan.decisions.context_length import default_context
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.session.status import Phase
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.windows import WindowOpener
from widgets.controls.values import AutoOptions
from widgets.serve.serve_pane import ServePane

_T = TypeVar("_T")
N_LAYERS = 4
LONG = ContextSettings(n_ctx=4 * 16_384, n_seq_max=4, threads=1, threads_batch=1)
"""Four answers at a time, each of them long: one that nobody stops goes on for longer than a test."""
HELLO = [{"role": "user", "content": "Hello"}]


class Bench:
    """A window with its server, and clients in threads of their own while the window goes on."""

    def __init__(self, qtbot: QtBot, window: WindowParts, folder: Path) -> None:
        self.window, self.desk, self._qtbot, self._folder = window, window.desk, qtbot, folder
        self._clients: list[threading.Thread] = []

    def wait(self, condition: Callable[[], bool]) -> None:
        self._qtbot.waitUntil(condition)

    def file(self, name: str, seed: int = 0) -> Path:
        return write_tiny_llama(self._folder / f"{name}.gguf", n_layers=N_LAYERS, seed=seed, n_ctx_train=1 << 17)

    def open(self, path: Path, device: str = CPU_ID) -> OpenModel:
        """Make a model current, and put all of it on one device."""
        self.desk.opener.open(path, beside=True)
        self.wait(lambda: self.desk.models.current.name == path.stem)
        self.desk.document.replace(Edit(single_device(N_LAYERS, device), LONG), "test")
        return self.desk.models.current

    def load(self, path: Path, device: str = CPU_ID) -> OpenModel:
        model = self.open(path, device)
        self.desk.loader.load()
        self.wait(lambda: model.loading.phase is Phase.READY)
        return model

    def start_worker(self) -> str:
        """Start a lab worker, and return its device. It serves one model at a time."""
        self.desk.rig.lab.start([160 * MIB])
        self.wait(lambda: len(self.desk.rig.live.rig.devices) == 1)
        return self.desk.rig.live.rig.ids[0]

    @property
    def presenter(self) -> ServePresenter:
        (found,) = self.window.main.findChildren(ServePresenter)
        return found

    @property
    def pane(self) -> ServePane:
        self.window.actions["serve"].trigger()
        pane = self.presenter.pane
        assert pane is not None
        return pane

    def start(self, *, port: int | None = None) -> ServePane:
        pane = self.pane
        pane.port_box.setValue(free_port() if port is None else port)
        pane.switch_button.click()
        self.wait(lambda: self.desk.server.state.phase is not ServerPhase.BUSY)
        return pane

    def stop(self) -> None:
        self.pane.switch_button.click()
        self.wait(lambda: self.desk.server.state.phase is ServerPhase.OFF)

    def ask(self, call: Callable[[], _T]) -> Future[_T]:
        """Begin a call of a client, which may wait for the server."""
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

        thread = threading.Thread(target=run)
        thread.start()
        self._clients.append(thread)
        return future

    def answer(self, call: Callable[[], _T]) -> _T:
        """Return what a client gets, while the window goes on."""
        future = self.ask(call)
        self.wait(future.done)
        return future.result()

    def client(self) -> openai.OpenAI:
        self.wait(lambda: bool(self.desk.server.state.key))
        state = self.desk.server.state
        return openai.OpenAI(base_url=f"{state.url}/v1", api_key=state.key, max_retries=0, timeout=DEADLINE_S)

    def say_hello(self, model: str, client: openai.OpenAI | None = None) -> str:
        with client or self.client() as asked:
            answer = self.answer(
                lambda: asked.chat.completions.create(model=model, messages=HELLO, max_tokens=4)  # type: ignore[arg-type]
            )
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
        return answer.model

    def stream(self, model: str = "") -> Stream:
        """Begin an answer that goes on until it is stopped, and wait for its first words."""
        stream = self.stream_of(model)
        self.wait(stream.begun.is_set)
        return stream

    def stream_of(self, model: str) -> Stream:
        """Ask for an answer that goes on until it is stopped; the model may have to be loaded first."""
        self.wait(lambda: bool(self.desk.server.state.key))
        stream = Stream(self.desk.server.state.url, self.desk.server.state.key, model)
        self.ask(stream.read)
        return stream

    def close(self) -> None:
        for thread in self._clients:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


class Stream:
    """A client that reads a long answer."""

    def __init__(self, url: str, key: str, model: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE_S)
        self._key, self._model = key, model
        self.begun, self.ended = threading.Event(), threading.Event()

    def read(self) -> None:
        asked = {"model": self._model, "messages": HELLO, "stream": True, "max_tokens": 100_000}
        headers = {"Authorization": f"Bearer {self._key}"}
        try:
            self._connection.request("POST", "/v1/chat/completions", json.dumps(asked).encode(), headers)
            reply = self._connection.getresponse()
            while line := reply.readline():
                if b'"content"' in line:
                    self.begun.set()
        except (OSError, http.client.HTTPException, ValueError):
            pass
        finally:
            self._connection.close()
            self.ended.set()

    def leave(self) -> None:
        """Go away in the middle, as a program that was killed."""
        assert self._connection.sock is not None
        self._connection.sock.shutdown(socket.SHUT_RDWR)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def bench(open_window: WindowOpener, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("LLAMA_CACHE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    opened = open_window()
    opened.desk.prober.close()
    found = Bench(qtbot, opened, tmp_path)
    yield found
    opened.main.close()
    found.close()


def test_a_program_asks_the_model_that_the_window_has_loaded(bench: Bench) -> None:
    model = bench.load(bench.file("ada"))
    pane = bench.start()
    child = model.loading.bridge.session.snapshot.loaded
    assert bench.say_hello("ada") == "ada"
    assert bench.say_hello("") == "ada"
    assert model.loading.bridge.session.snapshot.loaded is child
    assert [held.name for held in bench.desk.models.held] == ["ada"]
    rows = pane.table.requests
    bench.wait(lambda: [row.texts[7] for row in rows.rows] == ["200", "200"])
    row = rows.rows[0].texts
    assert row[1:3] == ("127.0.0.1", "ada")
    assert row[4] == "4"
    assert row[7] == "200"
    bench.stop()
    bench.wait(lambda: model.loading.phase is Phase.READY)


def test_the_chat_goes_on_beside_a_program_and_its_stop_stops_its_own_answer(bench: Bench) -> None:
    model = bench.load(bench.file("ada"))
    bench.start()
    stream = bench.stream()
    assert model.loading.phase is Phase.ANSWERING
    pane = bench.window.views.current.chat
    pane.prompt_edit.setPlainText("hello")
    pane.send_button.click()
    bench.wait(lambda: model.conversation.asked_request is not None)
    assert len(model.loading.bridge.session.snapshot.requests) == 2
    pane.stop_button.click()
    bench.wait(lambda: not model.conversation.is_answering)
    assert len(model.loading.bridge.session.snapshot.requests) == 1
    assert not stream.ended.is_set()
    bench.stop()
    bench.wait(stream.ended.is_set)
    bench.wait(lambda: model.loading.phase is Phase.READY)


def test_a_program_that_goes_away_stops_its_answer(bench: Bench) -> None:
    model = bench.load(bench.file("ada"))
    pane = bench.start()
    stream = bench.stream()
    stream.leave()
    bench.wait(lambda: model.loading.phase is Phase.READY)
    bench.wait(lambda: bool(pane.table.requests.rows) and pane.table.requests.rows[0].texts[7] == "client disconnected")


def test_a_model_that_is_not_loaded_is_loaded_in_the_window_beside_the_shown_one(bench: Bench) -> None:
    shown = bench.load(bench.file("ada"))
    other = bench.file("bob", seed=1)
    bench.desk.library.catalogue.index.save_folders((other.parent,))
    bench.start()
    assert bench.say_hello("bob") == "bob"
    assert bench.desk.models.current is shown
    assert [held.name for held in bench.desk.models.held] == ["ada", "bob"]
    (loaded,) = (model for model in bench.desk.models.all if model.name == "bob")
    assert loaded.keep_alive_s == 300.0
    bench.wait(lambda: loaded.status.phase is Phase.READY)
    assert len(bench.window.main.model_panel.loaded_list.rows()) == 2
    # It can be shown like any other, with the layout on which it runs.
    bench.desk.opener.show(loaded)
    assert bench.desk.document.model is loaded.file
    assert not loaded.status.is_edited


def test_names_and_idle_times_of_the_user_count_in_the_window_too(bench: Bench) -> None:
    path = bench.file("bob", seed=1)
    bench.desk.library.catalogue.index.save_folders((path.parent,))
    serve_settings_path().parent.mkdir(parents=True, exist_ok=True)
    kept = {"version": 1, "aliases": {"mine": "bob"}, "models": {"bob": {"keep_alive": "30m"}}}
    serve_settings_path().write_text(json.dumps(kept), encoding="utf-8")
    try:
        bench.start()
        assert bench.say_hello("mine") == "bob"
        assert bench.desk.models.current.keep_alive_s == 1800.0
    finally:
        serve_settings_path().unlink()


def test_a_window_without_a_model_shows_the_one_that_a_program_asked_for(bench: Bench) -> None:
    path = bench.file("ada")
    bench.desk.library.catalogue.index.save_folders((path.parent,))
    bench.start()
    bench.say_hello("ada")
    model = bench.desk.models.current
    assert model.name == "ada"
    assert model.keep_alive_s == 300.0
    assert bench.desk.document.model is not None
    # A file that a person opens in its place is that person's, and stays loaded.
    model.loading.unload()
    bench.wait(lambda: not model.loading.has_child)
    bench.desk.opener.open(bench.file("bob", seed=1))
    bench.wait(lambda: model.name == "bob")
    assert not model.is_of_program
    assert model.keep_alive_s == UNTIL_UNLOADED_S


def test_what_a_stopped_server_had_begun_ends_no_later_load(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.desk.library.catalogue.index.save_folders((bench.file("bob", seed=1).parent,))
    bench.file("carl", seed=2)
    opener, held = bench.desk.opener, list[tuple[object, ...]]()
    open_aside = opener.open_aside
    monkeypatch.setattr(opener, "open_aside", lambda *arguments: held.append(arguments))
    bench.start()
    with bench.client() as client:
        first = bench.ask(
            lambda: client.chat.completions.create(model="bob", messages=HELLO)  # type: ignore[arg-type]
        )
        bench.wait(lambda: len(held) == 1)
        bench.stop()
        bench.wait(first.done)
    bench.start()
    with bench.client() as client:
        second = bench.ask(
            lambda: client.chat.completions.create(model="carl", messages=HELLO, max_tokens=4)  # type: ignore[arg-type]
        )
        bench.wait(lambda: len(held) == 2)
        *_, failed = held[0]
        failed(ArgumentError("bob is gone"))  # type: ignore[operator]
        open_aside(*held[1])  # type: ignore[arg-type]
        bench.wait(second.done)
    assert second.result().model == "carl"


def test_a_model_whose_engine_was_killed_is_loaded_again_for_the_next_request(bench: Bench) -> None:
    before = set(psutil.Process().children(recursive=True))
    model = bench.load(bench.file("ada"))
    engines = set(psutil.Process().children(recursive=True)) - before
    bench.start()
    stream = bench.stream()
    for engine in engines:
        with suppress(psutil.NoSuchProcess):
            engine.kill()
    bench.wait(stream.ended.is_set)
    bench.wait(lambda: model.loading.phase is Phase.STOPPED)
    assert bench.desk.server.state.phase is ServerPhase.ON
    assert bench.say_hello("ada") == "ada"
    # The program has its answer before the window has heard of the end.
    bench.wait(lambda: model.loading.phase is Phase.READY)


def test_an_unknown_name_and_a_load_that_fails_are_told_to_the_program(bench: Bench) -> None:
    bench.load(bench.file("ada"))
    torn = bench.file("torn", seed=1)
    bench.desk.library.catalogue.index.save_folders((torn.parent,))
    bench.start()
    with pytest.raises(openai.NotFoundError, match="There is no model nobody"):
        bench.say_hello("nobody")
    assert bench.say_hello("torn") == "torn"  # known to the library from now on
    (model,) = (each for each in bench.desk.models.all if each.name == "torn")
    model.loading.unload()
    bench.wait(lambda: not model.loading.has_child)
    torn.write_bytes(torn.read_bytes()[:-4096])
    with pytest.raises(openai.InternalServerError):
        bench.say_hello("torn")
    assert bench.say_hello("ada") == "ada"


def test_an_idle_model_goes_for_another_and_one_that_answers_is_waited_for(bench: Bench) -> None:
    """Both are laid out on one worker, which serves one model at a time."""
    worker = bench.start_worker()
    bench.open(bench.file("bob", seed=1), worker)
    ada = bench.load(bench.file("ada"), device=worker)
    bob = next(model for model in bench.desk.models.all if model.name == "bob")
    bench.start()
    assert bench.say_hello("bob") == "bob"
    assert bench.desk.models.current is ada
    assert [held.name for held in bench.desk.models.held] == ["bob"]
    stream = bench.stream("bob")
    with bench.client() as client:
        waiting = bench.ask(
            lambda: client.chat.completions.create(model="ada", messages=HELLO, max_tokens=4)  # type: ignore[arg-type]
        )
        # The wait is known to the models when bob is taken back from the server.
        bench.wait(lambda: bench.desk.server.contexts == {})
        assert bob.loading.phase is Phase.ANSWERING
        assert not waiting.done()
        stream.leave()
        bench.wait(waiting.done)
    assert waiting.result().model == "ada"
    assert [held.name for held in bench.desk.models.held] == ["ada"]


def test_a_load_that_waits_is_given_up_with_its_last_client(bench: Bench) -> None:
    worker = bench.start_worker()
    bob = bench.load(bench.file("bob", seed=1), worker)
    bench.open(bench.file("ada"), worker)
    bench.start()
    stream, gone = bench.stream("bob"), bench.stream_of("ada")
    bench.wait(lambda: bench.desk.server.contexts == {})
    gone.leave()
    # Bob is lent again while it still answers.
    bench.wait(lambda: "bob" in bench.desk.server.contexts)
    assert bob.loading.phase is Phase.ANSWERING
    stream.leave()
    bench.wait(lambda: bob.loading.phase is Phase.READY)
    assert [held.name for held in bench.desk.models.held] == ["bob"]


def test_a_load_that_waits_is_for_its_file_even_if_a_person_opens_another_in_its_place(bench: Bench) -> None:
    worker = bench.start_worker()
    bench.load(bench.file("bob", seed=1), worker)
    ada = bench.open(bench.file("ada"), worker)
    bench.desk.library.catalogue.index.save_folders((bench.file("carl", seed=2).parent,))
    bench.start()
    stream = bench.stream("bob")
    with bench.client() as client:
        waiting = bench.ask(
            lambda: client.chat.completions.create(model="ada", messages=HELLO, max_tokens=4)  # type: ignore[arg-type]
        )
        bench.wait(lambda: bench.desk.server.contexts == {})
        bench.desk.opener.open(bench.file("carl", seed=2))
        bench.wait(lambda: ada.name == "carl")
        stream.leave()
        bench.wait(waiting.done)
    assert waiting.result().model == "ada"
    assert ada.loading.phase is Phase.STOPPED
    assert bench.say_hello("carl") == "carl"
    loaded = [model.loading.bridge.session.snapshot.loaded for model in bench.desk.models.all]
    assert [None if info is None else info.order.plan.model.name for info in loaded] == [
        None if info is None else model.name for model, info in zip(bench.desk.models.all, loaded, strict=True)
    ]


def test_snippets_have_name_and_context_of_a_model_that_is_loaded_later(bench: Bench) -> None:
    pane = bench.start()
    pane.program_box.setCurrentText("Zed")
    bench.load(bench.file("ada"))
    bench.wait(lambda: '"ada"' in pane.snippet_edit.toPlainText())
    # Another model that is not loaded is shown.
    bench.open(bench.file("bob", seed=1))
    bench.wait(lambda: bench.desk.models.current.name == "bob")
    assert '"name": "ada"' in pane.snippet_edit.toPlainText()
    assert '"max_tokens": 16384' in pane.snippet_edit.toPlainText()


def test_faults_of_the_address_are_said_in_the_panel(bench: Bench) -> None:
    bench.load(bench.file("ada"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        pane = bench.start(port=port)
        assert pane.fault_label.text() == f"Another program uses port {port}. Choose another port."
        assert pane.switch_button.isEnabled()
    pane.host_edit.setText("192.0.2.17")
    pane.switch_button.click()
    assert "Allow unencrypted requests" in pane.fault_label.text()
    pane.key_box.click()
    pane.switch_button.click()
    assert "Require the key" in pane.fault_label.text()
    pane.key_box.click()
    pane.plain_box.click()
    pane.switch_button.click()
    bench.wait(lambda: bench.desk.server.state.phase is ServerPhase.OFF)
    assert pane.fault_label.text().startswith("This computer does not have the address 192.0.2.17.")
    pane.host_edit.setText("")
    pane.switch_button.click()
    assert pane.fault_label.text().startswith("Enter an address to listen on")
    pane.host_edit.setText("127.0.0.1")
    bench.start()
    assert not pane.fault_label.isVisible()
    assert bench.say_hello("ada") == "ada"


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


def test_the_end_of_the_window_ends_streams_and_the_server(bench: Bench) -> None:
    bench.load(bench.file("ada"))
    bench.start()
    port = bench.desk.settings.serve_port
    streams = [bench.stream() for _ in range(2)]
    bench.window.main.close()
    for stream in streams:
        assert stream.ended.wait(DEADLINE_S)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def test_texts_are_kept_only_while_the_switch_is_on(bench: Bench) -> None:
    bench.load(bench.file("ada"))
    pane = bench.start()
    bench.say_hello("ada")
    pane.texts_box.click()
    bench.say_hello("ada")
    bench.wait(lambda: len(pane.table.requests.rows) == 2)
    pane.table.selectRow(1)
    assert pane.text_edit.toPlainText() == "The text of this request was not saved."
    pane.table.selectRow(0)
    bench.wait(lambda: '"Hello"' in pane.text_edit.toPlainText())
    number = pane.table.chosen
    assert number is not None
    pane.texts_box.click()
    assert bench.desk.server.text_of(number) is None
    assert not pane.text_edit.toPlainText()


def test_the_panel_is_not_updated_for_each_token(bench: Bench) -> None:
    bench.load(bench.file("ada"))
    bench.start()
    stream = bench.stream()
    session = bench.desk.loading.bridge.session
    bench.wait(lambda: bench.presenter.n_updates > 0)
    before, tokens = bench.presenter.n_updates, session.snapshot
    assert tokens.requests
    bench.wait(lambda: not bench.presenter.is_waiting)
    # What comes now are tokens alone.
    settled = bench.presenter.n_updates
    assert settled - before <= 2
    bench.say_hello("ada")
    # The presenter hears of the request in the GUI thread, which may be after its answer came.
    bench.wait(lambda: bench.presenter.n_updates > settled)
    stream.leave()


def test_the_server_starts_with_a_window_that_wants_it(bench: Bench, open_window: WindowOpener) -> None:
    assert not bench.desk.settings.serves_at_start
    pane = bench.pane
    pane.start_box.click()
    assert bench.desk.settings.serves_at_start
    assert bench.window.actions["serve_at_start"].isChecked()
    bench.desk.settings.serve_port = free_port()
    bench.desk.settings.sync()
    again = open_window()
    again.start(files=(), rig=None)
    bench.wait(lambda: again.desk.server.state.phase is ServerPhase.ON)
    assert again.desk.server.state.url.endswith(str(bench.desk.settings.serve_port))


def test_models_that_are_not_loaded_are_listed_with_what_they_would_take(bench: Bench) -> None:
    bench.load(bench.file("ada"))
    bench.desk.library.catalogue.index.save_folders((bench.file("bob", seed=1).parent,))
    bench.start()
    with bench.client() as client:
        found = bench.answer(lambda: client.models.retrieve("bob")).model_dump()
        listed = bench.answer(lambda: list(client.models.list()))
    assert found["fits"] == "yes"
    assert [row["id"] for row in found["forecast"]] == [CPU_ID]
    layout = parse_layout(json.dumps(found["layout"]), source="bob", n_layers=N_LAYERS).layout
    assert layout == single_device(N_LAYERS, CPU_ID)
    assert [each.id for each in listed] == ["ada", "bob"]


def test_a_forecast_counts_idle_models_as_leaving(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.load(bench.file("ada"))
    bench.desk.library.catalogue.index.save_folders((bench.file("bob", seed=1).parent,))
    live = bench.desk.rig.live
    reported = live.reported()
    host = replace(reported.host, free_bytes=0, margin_bytes=0)
    monkeypatch.setattr(live, "reported", lambda: replace(reported, host=host))
    bench.start()
    with bench.client() as client:
        found = bench.answer(lambda: client.models.retrieve("bob")).model_dump()
    assert (found["fits"], found["unloads"]) == ("after_unloading", ["ada"]), found


def test_a_model_is_loaded_for_a_program_with_the_preferred_strategy(bench: Bench) -> None:
    shown = bench.load(bench.file("ada"))
    bench.desk.library.catalogue.index.save_folders((bench.file("bob", seed=1).parent,))
    bench.desk.auto_layouts.set_options(AutoOptions(strategy="context"))
    bench.start()
    bench.say_hello("bob")
    (loaded,) = (model for model in bench.desk.models.all if model.name == "bob")
    info = loaded.loading.loaded
    assert info is not None
    assert shown.file is not None
    assert info.edit.context.n_ctx > default_context(shown.file).n_ctx


def test_forecasts_end_with_the_server(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forecast that waits for the window does not hold up the end of the server."""
    bench.desk.library.catalogue.index.save_folders((bench.file("bob", seed=1).parent,))
    bench.start()
    held: list[object] = []
    monkeypatch.setattr("app.serving.served_models.ServedModels._answer", lambda _self, reading: held.append(reading))
    with bench.client() as client:
        asked = bench.ask(lambda: client.models.retrieve("bob"))
        bench.wait(lambda: bool(held))
        bench.stop()
        bench.wait(asked.done)
