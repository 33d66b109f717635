"""Weights that a worker keeps: a second load of the model sends none of the large ones."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import Device, Rig
from engine.machines.rigs.discovery import host_device
from engine.machines.rigs.lab import ServingChild
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device, split_evenly
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime import plan_requests
from engine.runtime.plan_requests import early_weights
from engine.runtime.protocol.requests import Serve
from engine.runtime.session.events import Loaded, sent_text
from tests.support.load_specs import plan_of, spec_of, worker_device
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.session_log import SessionLog

THRESHOLD_BYTES = 10 * MIB
"""llama.cpp's: smaller tensors are always sent."""


class CountingRelay:
    """A port that leads to a worker, and counts the bytes that are sent to it."""

    def __init__(self, port: int) -> None:
        self.sent_bytes = 0
        self.on_sent: Callable[[], None] = lambda: None
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
                    self.on_sent()
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
def serving(folder: Path | None, quota_bytes: int = GIB) -> Iterator[CountingRelay]:
    """A worker that keeps weights in `folder`, behind a relay."""
    kept = None if folder is None else str(folder)
    child = ServingChild(Serve(host="127.0.0.1", port=0, weight_cache=kept, cache_quota_bytes=quota_bytes))
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
        log.session.load(spec_of(memory, rig, layout, ContextSettings(n_ctx=256)))
        ending = log.wait_for_endings(1)[0]
        assert isinstance(ending, Loaded), ending
    return relay.sent_bytes - before


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> ModelMemory:
    path = tmp_path_factory.mktemp("models") / "wide.gguf"
    return ModelMemory(read_model(write_tiny_llama(path, n_layers=2, n_embd=1024, n_ff=6144, n_vocab=2048)))


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are sent early although the models here are small."""
    monkeypatch.setattr(plan_requests, "EARLY_LEAST_BYTES", 0)


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


def load_on_both(memory: ModelMemory, first: CountingRelay, second: CountingRelay) -> Loaded:
    """Load a layer on each of two workers."""
    ports = (first.port, second.port)
    devices = [worker_device(f"RPC{number}", f"127.0.0.1:{port}", GIB) for number, port in enumerate(ports)]
    with SessionLog() as log:
        layout = split_evenly(2, ["RPC0", "RPC1"])
        log.session.load(spec_of(memory, Rig(tuple(devices), host_device()), layout, ContextSettings(n_ctx=256)))
        ending = log.wait_for_endings(1)[0]
    assert isinstance(ending, Loaded), ending
    return ending


@pytest.mark.exhaustive
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts the bytes of a connection")
def test_several_workers_get_their_weights_at_the_same_time(memory: ModelMemory, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    large_bytes = sum(tensor.size_bytes for tensor in memory.model.tensors if tensor.size_bytes > THRESHOLD_BYTES)
    with serving(folders[0]) as first, serving(folders[1]) as second:
        met: list[bool] = []
        arrived = [threading.Event(), threading.Event()]

        # After the first large tensor has begun, each link waits until the other has one, too.
        def wait_for_other(relay: CountingRelay, own: int) -> None:
            if relay.sent_bytes > THRESHOLD_BYTES // 2 and not arrived[own].is_set():
                arrived[own].set()
                met.append(arrived[1 - own].wait(DEADLINE_S / 2))

        for number, relay in enumerate((first, second)):
            relay.on_sent = partial(wait_for_other, relay, number)
        sent = load_on_both(memory, first, second)
        assert met == [True, True], "one link waited for the end of the other"
        assert [each.devices for each in sent.sent] == [("RPC0",), ("RPC1",)]
        assert all(each.sent_bytes >= large_bytes // 2 and each.kept_bytes == 0 for each in sent.sent)
        again = load_on_both(memory, first, second)
        for each in again.sent:
            assert each.kept_bytes >= large_bytes // 2 - THRESHOLD_BYTES // 10
            assert each.sent_bytes < each.weights_bytes - large_bytes // 2 + THRESHOLD_BYTES // 10
    assert "send" in sent.seconds
    assert sent_text(sent.sent[0]).endswith(", 0 B already cached")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts the bytes of a connection")
def test_a_worker_that_keeps_nothing_gets_little_twice(memory: ModelMemory) -> None:
    with serving(None) as first, serving(None) as second:
        for each in load_on_both(memory, first, second).sent:
            assert each.sent_bytes < each.weights_bytes + 21 * MIB, "the probe of 10 MiB, twice"


def test_small_models_are_not_sent_early(memory: ModelMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    devices = (worker_device("RPC0", "127.0.0.1:5000", GIB), worker_device("RPC1", "127.0.0.1:5001", GIB))
    layout = split_evenly(2, ["RPC0", "RPC1"])
    plan = plan_of(memory, Rig(devices, host_device()), layout, ContextSettings(n_ctx=256))
    assert early_weights(plan) == (), "to find out whether the workers cache would take longer than it saves"
    monkeypatch.setattr(plan_requests, "EARLY_LEAST_BYTES", 60 * MIB)
    assert len(early_weights(plan)) == 2


def test_one_worker_gets_nothing_early(memory: ModelMemory) -> None:
    near = worker_device("RPC0", "127.0.0.1:5000", GIB)
    far = worker_device("RPC1", "127.0.0.1:5001", GIB)

    def asked(*devices: str, rig: tuple[Device, ...] = (near, far)) -> list[str]:
        plan = plan_of(memory, Rig(rig, host_device()), split_evenly(2, devices), ContextSettings(n_ctx=256))
        return [each.device for each in early_weights(plan)]

    assert asked("RPC0") == asked("RPC0", "CPU") == []
    assert asked("RPC0", "RPC1") == ["RPC0", "RPC1"]
    same = replace(far, endpoint=near.endpoint, endpoint_device=1)
    assert asked("RPC0", "RPC1", rig=(near, same)) == [], "one link"
