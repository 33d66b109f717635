"""Weights that a worker keeps: the second load of a model sends none of the large ones."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from engine.base.units import GIB, MIB
from engine.devices.device import Rig
from engine.machines.rigs.discovery import host_device
from engine.machines.rigs.lab import ServingChild
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.messages import Serve
from engine.runtime.session.events import Loaded
from tests.support.models import write_tiny_llama
from tests.support.orders import order_of, worker_device
from tests.support.patience import DEADLINE_S
from tests.support.session_log import SessionLog

THRESHOLD_BYTES = 10 * MIB
"""llama.cpp's: smaller tensors are always sent."""


class CountingRelay:
    """A port that leads to a worker, and counts the bytes that are sent to it."""

    def __init__(self, port: int) -> None:
        self.sent_bytes = 0
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            worker = socket.create_connection(("127.0.0.1", self._to))
            self._open += [client, worker]
            for source, target, counts in ((client, worker, True), (worker, client, False)):
                thread = threading.Thread(target=self._relay, args=(source, target, counts))
                self._threads.append(thread)
                thread.start()

    def _relay(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while block := source.recv(1 << 18):
                target.sendall(block)
                if counts:
                    self.sent_bytes += len(block)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        # A listener that is closed only would keep the thread that waits for it.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._open:
            each.close()


@contextmanager
def serving(folder: Path) -> Iterator[CountingRelay]:
    """A worker that keeps weights in `folder`, behind a relay."""
    child = ServingChild(Serve(host="127.0.0.1", port=0, kept_weights=str(folder), kept_quota_bytes=GIB))
    child.start()
    try:
        relay = CountingRelay(child.wait_until_serving(time.monotonic() + DEADLINE_S).port)
        try:
            yield relay
        finally:
            relay.close()
    finally:
        child.begin_stop()
        child.wait_for_end(DEADLINE_S)


def load(memory: ModelMemory, relay: CountingRelay) -> int:
    """Load all of a model on the worker and return the bytes that went there."""
    before = relay.sent_bytes
    rig = Rig((worker_device("RPC0", f"127.0.0.1:{relay.port}", GIB),), host_device())
    layout = single_device(memory.model.n_layers, "RPC0")
    with SessionLog() as log:
        log.session.load(order_of(memory, rig, layout, ContextSettings(n_ctx=256)))
        ending = log.wait_for_endings(1)[0]
        assert isinstance(ending, Loaded), ending
    return relay.sent_bytes - before


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> ModelMemory:
    path = tmp_path_factory.mktemp("models") / "wide.gguf"
    return ModelMemory(read_model(write_tiny_llama(path, n_layers=2, n_embd=1024, n_ff=6144, n_vocab=2048)))


def test_large_weights_are_sent_once(memory: ModelMemory, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    large = [tensor.size_bytes for tensor in memory.model.tensors if tensor.size_bytes > THRESHOLD_BYTES]
    assert len(large) == 6
    with serving(folder) as relay:
        first, second = load(memory, relay), load(memory, relay)
        assert first > sum(large)
        # On a busy machine a load may send 1.2 MB more of other things; a large tensor is above the threshold.
        least = first - sum(large) + THRESHOLD_BYTES
        assert 0 < second < least, "none of the large ones was sent again"
        deadline = time.monotonic() + DEADLINE_S
        whole: dict[str, int] = {}
        while sorted(whole.values()) != sorted(large):
            assert time.monotonic() < deadline, whole
            threading.Event().wait(0.05)
            with suppress(FileNotFoundError):
                whole = json.loads((folder / "whole.json").read_text())
    with serving(folder) as relay:
        assert 0 < load(memory, relay) < least, "another worker goes on with them"
