"""Endings of a model child: with its parent, with a lost worker, on request; native output never breaks the pipe."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.messages import (
    Aborting,
    DeviceList,
    Failure,
    GgmlDevice,
    LoadedModel,
    LoadStage,
    Reading,
    StageProgress,
)
from engine.runtime.protocol.requests import DeviceRef, Generate, ListDevices, Load, Quit
from tests.engine.runtime.child.raw_child import RawChild, entries, rpc_workers
from tests.support.models import write_tiny_llama

CONTEXT = ContextSettings(n_ctx=4096, threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that every stage lasts some milliseconds."""
    path = tmp_path_factory.mktemp("model") / "wide.gguf"
    return write_tiny_llama(path, n_layers=4, n_embd=512, n_head=8, n_head_kv=8, n_ff=1536)


def request(model: Path, refs: tuple[DeviceRef, ...]) -> Load:
    return Load(path=str(model), devices=refs, parameters=entries(("W0", 2), ("W1", 3)), context=CONTEXT)


def read_until(child: RawChild, stage: LoadStage) -> None:
    while isinstance(message := child.message(), StageProgress):
        if message.stage == stage:
            return
    raise AssertionError(f"{stage} was not reached: {message}")


@pytest.mark.parametrize("stage", ["allocate", "read", "context", "warm_up"])
def test_the_end_of_input_ends_it_in_every_stage(model: Path, stage: LoadStage) -> None:
    with rpc_workers(None, None) as (_, refs), RawChild() as child:
        child.send(request(model, refs))
        read_until(child, stage)
        assert child.process.stdin is not None
        child.process.stdin.close()
        assert child.ended() == 0


def test_quit_ends_a_load_and_a_loaded_worker(model: Path) -> None:
    with rpc_workers(None, None) as (_, refs):
        with RawChild() as child:
            child.send(request(model, refs))
            child.send(Quit())
            assert child.ended() == 0
        with RawChild() as child:
            assert isinstance(child.ask(request(model, refs)), LoadedModel)
            child.send(Quit())
            assert child.ended() == 0


@pytest.mark.parametrize("stage", ["read", "context", "warm_up"])
def test_a_server_killed_while_loading_ends_it_with_a_last_word(model: Path, stage: LoadStage) -> None:
    with rpc_workers(None, None) as (workers, refs), RawChild() as child:
        child.send(request(model, refs))
        read_until(child, stage)
        workers[1].process.kill()
        answer = child.answer()
        if isinstance(answer, LoadedModel):  # it was over; the loss shows at the next use
            answer = child.ask(Generate(prompt="x", max_tokens=50))
        assert isinstance(answer, Aborting)
        assert "RPC server" in answer.text
        assert "/" not in answer.text
        assert child.ended() < 0


def test_a_server_killed_while_generating_ends_it_with_a_last_word(model: Path) -> None:
    with rpc_workers(None, None) as (workers, refs), RawChild() as child:
        assert isinstance(child.ask(request(model, refs)), LoadedModel)
        child.send(Generate(prompt="Hello", seed=1, temperature=2.0))
        assert isinstance(child.message(), Reading)
        workers[0].process.kill()
        answer = child.answer()
        assert isinstance(answer, Aborting)
        assert "RPC server" in answer.text
        assert child.ended() < 0


def test_an_endpoint_without_a_server_is_named(model: Path) -> None:
    with socket.socket() as reserved, RawChild() as child:
        reserved.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{reserved.getsockname()[1]}"
        refs = tuple(DeviceRef(id=name, backend="RPC", endpoint=endpoint) for name in ("W0", "W1"))
        answer = child.ask(request(model, refs))
        assert isinstance(answer, Aborting)
        assert endpoint in answer.text
        assert child.ended() < 0


def test_devices_are_listed_with_those_of_servers() -> None:
    with rpc_workers(None) as (_, refs), RawChild() as child:
        assert refs[0].endpoint is not None
        answer = child.ask(ListDevices(endpoints=(refs[0].endpoint,)))
    assert isinstance(answer, DeviceList)
    host, remote = answer.devices[-2], answer.devices[-1]
    assert isinstance(host, GgmlDevice)
    assert (host.name, host.kind, host.endpoint) == ("CPU", "cpu", None)
    assert (remote.backend, remote.kind, remote.endpoint) == ("RPC", "gpu", refs[0].endpoint)
    assert remote.total_bytes == host.total_bytes > 0
    assert not remote.row_split


def test_nonsense_is_answered_and_survived() -> None:
    with RawChild() as child:
        assert child.process.stdin is not None
        deep = b'{"x":' + b"[" * 60_000 + b"\n"
        for line in (b"nonsense\n", b'{"type": "fly"}\n', b"\xff\xfe\n", deep, b"\n"):
            child.process.stdin.write(line)
        child.process.stdin.flush()
        answers = [child.answer() for _ in range(4)]
        assert all(isinstance(answer, Failure) and answer.kind == "internal" for answer in answers)
        assert isinstance(child.ask(ListDevices()), DeviceList)
