"""RPC servers that greet correctly and then misbehave: one error that names the endpoint, in bounded time."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path

import pytest

from engine.base.errors import EngineError, UnreachableError
from engine.devices.device import Device, Rig
from engine.machines.rigs import discovery
from engine.machines.rigs.discovery import discover, host_device
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.probing import probe as probing
from engine.runtime.probing.probe import probe
from tests.support.models import write_tiny_llama
from tests.support.plans import make_plan
from tests.support.rpc_peers import ANSWER, FACTS, HELLO_BYTES, answer_questions, receive, serve_peer
from tests.support.selection import some

HELLO = 14
ASKED = (11, HELLO, 15)
"""The commands of a list of devices."""

Fault = Callable[[socket.socket], None]


def silent(client: socket.socket) -> None:
    while client.recv(4096):
        pass


def hang_up(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_RDWR)


def too_long(client: socket.socket) -> None:
    client.sendall(struct.pack("<Q", 1 << 62) + bytes(64))
    silent(client)


def too_short(client: socket.socket) -> None:
    client.sendall(struct.pack("<QB", 1, 0))
    hang_up(client)


def endless(client: socket.socket) -> None:
    while True:
        client.sendall(b"\xff" * 4096)


SQLITE_ERRORS = (silent, hang_up, too_long, too_short, endless)


def turning(command: int, fault: Fault) -> AbstractContextManager[str]:
    """Serve the first connection, which is ours, as it should be; the next ones get `fault` for `command`."""
    connections = count()

    def talk(client: socket.socket) -> None:
        is_ours = next(connections) == 0
        receive(client, HELLO_BYTES)
        if command == HELLO and not is_ours:
            fault(client)
            return
        client.sendall(ANSWER)
        if is_ours:
            answer_questions(client)
            return
        while header := receive(client, 9):
            asked, size = struct.unpack("<BQ", header)
            receive(client, size)
            if asked == command or asked not in FACTS:
                fault(client)
                return
            client.sendall(struct.pack("<Q", len(FACTS[asked])) + FACTS[asked])

    return serve_peer(talk)


CASES = some([(command, fault) for fault in SQLITE_ERRORS for command in ASKED], 6)


@pytest.mark.parametrize(("command", "fault"), CASES)
def test_a_server_that_turns_on_the_engine_is_named(
    command: int, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "ENDPOINTS_TIMEOUT_S", 2.0)
    with turning(command, fault) as endpoint, pytest.raises(UnreachableError) as refused:
        discover((endpoint,))
    assert refused.value.kind == "unreachable"
    assert refused.value.endpoint == endpoint
    assert endpoint in refused.value.summary()


@pytest.mark.parametrize("facts", [
    *[{15: struct.pack("<I", number)} for number in (0, 65, (1 << 32) - 1)],
    *[{1: struct.pack("<Q", number)} for number in (0, 3, 1 << 40)],
    *[{11: struct.pack("<QQ", free, total)} for free, total in ((1 << 63, 1 << 63), ((1 << 64) - 1, 1))],
])  # fmt: skip
def test_absurd_numbers_never_reach_the_engine(facts: dict[int, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_child(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a child was asked")

    monkeypatch.setattr(discovery, "request_child", no_child)

    def talk(client: socket.socket) -> None:
        receive(client, HELLO_BYTES)
        client.sendall(ANSWER)
        answer_questions(client, {**FACTS, **facts})

    with serve_peer(talk) as endpoint, pytest.raises(UnreachableError) as refused:
        discover((endpoint,))
    assert refused.value.endpoint == endpoint


@pytest.mark.parametrize("fault", some(SQLITE_ERRORS, 1))
@pytest.mark.parametrize("command", some(range(19), 2))
def test_a_probe_of_a_server_that_turns_ends_and_names_it(
    tmp_path: Path, command: int, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "ENDPOINTS_TIMEOUT_S", 2.0)
    model = read_model(write_tiny_llama(tmp_path / "tiny.gguf"))
    context = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
    with turning(command, fault) as endpoint:
        rig = Rig((Device("RPC0", "attic", "RPC", "gpu", 1 << 30, endpoint=endpoint),), host_device())
        plan = make_plan(model, rig, Edit(single_device(model.n_layers, "RPC0"), context))
        try:
            probe(plan)
        except EngineError as error:
            found: EngineError | None = error
        else:
            found = None  # a dry run has no use for this command
    assert found is None or (isinstance(found, UnreachableError) and endpoint in found.summary())
