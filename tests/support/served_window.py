"""A window with its API server, and clients of the server."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import openai
import pytest
from pytestqt.qtbot import QtBot

from app.models.open_model import OpenModel
from app.serving.api_server import ServerPhase
from app.window.serve_presenter import ServePresenter
from app.wiring import WindowObjects
from engine.base.units import MIB
from engine.devices.device import CPU_ID
from engine.planning.layout.layout import single_device
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.session.status import Phase
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.ports import free_port
from tests.support.windows import WindowOpener
from widgets.serve.serve_pane import ServePane

_T = TypeVar("_T")
N_LAYERS = 4
LONG = ContextSettings(n_ctx=4 * 16_384, n_seq_max=4, threads=1, threads_batch=1)
"""Four answers at a time, each of them long: one that nobody stops goes on for longer than a test."""
HELLO = [{"role": "user", "content": "Hello"}]


class Bench:
    """A window with its server, and clients in threads of their own while the window goes on."""

    def __init__(self, qtbot: QtBot, window: WindowObjects, folder: Path) -> None:
        self.window, self.desk, self._qtbot, self._folder = window, window.desk, qtbot, folder
        self._clients: list[threading.Thread] = []

    def wait(self, condition: Callable[[], bool]) -> None:
        self._qtbot.waitUntil(condition)

    def file(self, name: str, seed: int = 0) -> Path:
        return write_tiny_llama(self._folder / f"{name}.gguf", n_layers=N_LAYERS, seed=seed, n_ctx_train=1 << 17)

    def open(self, path: Path, device: str = CPU_ID) -> OpenModel:
        """Make a model current, and put all of it on one device."""
        self.desk.opener.open(path, keep_current=True)
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


@contextmanager
def served_window(
    open_window: WindowOpener, qtbot: QtBot, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    """Open a window whose library and keys are in `folder`."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(folder / name))
    for name in ("LLAMA_CACHE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    opened = open_window()
    opened.desk.prober.close()
    found = Bench(qtbot, opened, folder)
    yield found
    opened.main.close()
    found.close()
