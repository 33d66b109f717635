"""Workers that begin to misbehave during a load or answer: one error that names the endpoint, bounded memory."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.device import Rig
from engine.machines.rigs.lab import LabRig
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.requests import Generate
from engine.runtime.session.events import AnyEvent, Crashed, Failed, Loaded, OutOfMemory
from tests.support.load_specs import spec_of
from tests.support.models import write_tiny_llama
from tests.support.rpc_proxy import Lie, turning
from tests.support.selection import some
from tests.support.session_log import SessionLog

ALLOC_BUFFER, GET_ALIGNMENT, GET_MAX_SIZE, GET_BASE, GET_TENSOR, GET_ALLOC_SIZE = 0, 1, 2, 3, 8, 13
DEVICE_COUNT = 15
STALL_S = 8.0
CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)


def silent(client: socket.socket, _answer: bytes) -> None:
    while client.recv(4096):
        pass


def half(client: socket.socket, answer: bytes) -> None:
    client.sendall(struct.pack("<Q", len(answer)) + answer[: len(answer) // 2])


def half_and_silence(client: socket.socket, answer: bytes) -> None:
    half(client, answer)
    silent(client, answer)


def false_size(client: socket.socket, answer: bytes) -> None:
    client.sendall(struct.pack("<Q", 1 << 62) + answer)
    silent(client, answer)


def endless(client: socket.socket, _answer: bytes) -> None:
    while True:
        client.sendall(b"\xff" * 4096)


def largest(client: socket.socket, answer: bytes) -> None:
    client.sendall(struct.pack("<Q", len(answer)) + b"\xff" * len(answer))


def none(client: socket.socket, answer: bytes) -> None:
    client.sendall(struct.pack("<Q", len(answer)) + bytes(len(answer)))


def one(client: socket.socket, answer: bytes) -> None:
    client.sendall(struct.pack("<Q", len(answer)) + b"\1" + bytes(len(answer) - 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return read_model(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=2))


@pytest.fixture
def worker() -> Iterator[tuple[Rig, str]]:
    with LabRig([256 * MIB]) as lab:
        endpoint = lab.rig.devices[0].endpoint
        assert endpoint is not None
        yield lab.rig, endpoint


LOADS: list[tuple[int, Lie]] = [
    (GET_ALLOC_SIZE, silent),
    (ALLOC_BUFFER, largest),
    (GET_MAX_SIZE, one),
    (GET_ALIGNMENT, none),
    (DEVICE_COUNT, largest),
    (GET_ALLOC_SIZE, largest),
    (ALLOC_BUFFER, half_and_silence),
    (GET_BASE, none),
    (GET_ALIGNMENT, largest),
    (ALLOC_BUFFER, false_size),
    (GET_MAX_SIZE, none),
    (GET_BASE, largest),
    (ALLOC_BUFFER, half),
    (GET_ALLOC_SIZE, endless),
]
ANSWERS: list[Lie] = [silent, half_and_silence, false_size, half, endless]


def ending_of(
    worker: tuple[Rig, str], model: ModelFile, command: int, lie: Lie, *, in_answer: bool = False
) -> tuple[AnyEvent, str, int]:
    """Return how the load or the answer ended, the endpoint, and the most memory that a child held meanwhile."""
    rig, real = worker
    turns = threading.Event()
    most_bytes, liars = [0], list[int]()
    if not in_answer:
        turns.set()

    def choose(connection: int, asked: int) -> Lie | None:
        if connection == 0 or asked != command or not turns.is_set() or liars[:1] not in ([], [connection]):
            return None  # our own hello, before and after
        liars.append(connection)
        return watched

    def watched(client: socket.socket, answer: bytes) -> None:
        try:
            lie(client, answer)
        finally:
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    most_bytes[0] = max(most_bytes[0], child.memory_info().rss)

    with turning(real, choose) as endpoint, SessionLog(stall_limit_s=STALL_S) as log:
        device = replace(rig.devices[0], endpoint=endpoint)
        layout = single_device(model.n_layers, device.id)
        log.session.load(spec_of(model, Rig((device,), rig.host), layout, CONTEXT))
        endings = log.wait_for_endings(1)
        if in_answer:
            assert isinstance(endings[0], Loaded), endings[0]
            turns.set()
            log.session.ask(Generate(prompt="Once", max_tokens=4))
            endings = log.wait_for_endings(2)
        return endings[-1], endpoint, most_bytes[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("command", "lie"), some(LOADS, 2))
def test_a_worker_that_turns_in_a_load_is_named(
    worker: tuple[Rig, str], model: ModelFile, command: int, lie: Lie
) -> None:
    ending, endpoint, most_bytes = ending_of(worker, model, command, lie)
    # Some lies do no harm: a load that came through is as good as the worker says.
    assert isinstance(ending, Failed | OutOfMemory | Crashed | Loaded), ending
    assert isinstance(ending, OutOfMemory | Loaded) or endpoint in ending.message
    assert most_bytes < 1 << 30


@pytest.mark.exhaustive
@pytest.mark.parametrize("lie", some(ANSWERS, 1))
def test_a_worker_that_turns_in_an_answer_is_named(worker: tuple[Rig, str], model: ModelFile, lie: Lie) -> None:
    ending, endpoint, most_bytes = ending_of(worker, model, GET_TENSOR, lie, in_answer=True)
    assert isinstance(ending, Failed), ending
    assert endpoint in ending.message
    assert most_bytes < 1 << 30
