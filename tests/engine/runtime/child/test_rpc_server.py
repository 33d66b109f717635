"""The RPC worker: its memory cap, checked addresses, and its end with the parent."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from engine.base.units import GIB, MIB
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.child import rpc_server
from engine.runtime.child.rpc_server import is_listening
from engine.runtime.protocol.messages import AllocationFailure, Failure, LoadedModel, Probed, Serving
from engine.runtime.protocol.requests import Load, Probe, Serve
from tests.engine.runtime.child.raw_child import RawChild, entries, rpc_workers
from tests.support.models import write_tiny_llama

BEYOND_CAP_BYTES = 16 * MIB


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts all private memory in RLIMIT_DATA")
def test_what_is_forecast_to_fill_the_cap_fits_and_more_does_not(tmp_path: Path) -> None:
    path = write_tiny_llama(
        tmp_path / "wide.gguf", n_layers=4, n_embd=512, n_head=8, n_head_kv=8, n_ff=1536, n_ctx_train=1 << 17
    )
    context = ContextSettings(n_ctx=16384, n_ubatch=64, threads=1)
    parameters = entries(("W0", 5))
    with rpc_workers(None) as (_, refs), RawChild() as child:
        probed = child.ask(Probe(path=str(path), devices=refs, parameters=parameters, context=context))
    assert isinstance(probed, Probed)
    need_bytes = sum(
        part.weights_bytes + part.kv_cache_bytes + part.compute_bytes for part in probed.parts if part.device == "W0"
    )
    assert need_bytes > 128 * MIB
    for cap_bytes, expected in ((need_bytes, LoadedModel), (need_bytes - BEYOND_CAP_BYTES, AllocationFailure)):
        with rpc_workers(cap_bytes) as (_, refs), RawChild() as child:
            answer = child.ask(Load(path=str(path), devices=refs, parameters=parameters, context=context))
            assert isinstance(answer, expected), answer


def test_it_says_where_it_serves_and_what_it_enforces() -> None:
    with RawChild() as free, RawChild() as capped:
        unlimited = free.ask(Serve(host="127.0.0.1", port=0))
        limited = capped.ask(Serve(host="127.0.0.1", port=0, cap_bytes=MIB))
        assert isinstance(unlimited, Serving)
        assert isinstance(limited, Serving)
        assert not unlimited.caps_enforced
        assert limited.caps_enforced == sys.platform.startswith("linux")
        for port in (unlimited.port, limited.port):
            with socket.create_connection(("127.0.0.1", port), timeout=10):
                pass


def test_an_address_that_cannot_be_had_is_refused() -> None:
    with socket.socket() as taken, RawChild() as child:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answers = [
            child.ask(Serve(host="127.0.0.1", port=port)),
            child.ask(Serve(host="203.0.113.1", port=0)),
            child.ask(Serve(host="127.0.0.1", port=1 << 17)),
            child.ask(Serve(host="127.0.0.1", port=0, device="CUDA77")),
        ]
        assert isinstance(child.ask(Serve(host="127.0.0.1", port=0)), Serving)
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    assert [failure.kind for failure in failures] == ["argument"] * 4
    assert str(port) in failures[0].message
    assert "203.0.113.1" in failures[1].message
    assert "CUDA77" in failures[3].message
    assert "CPU" in failures[3].message


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a connection has to tell")
def test_a_port_that_another_process_was_quicker_to_take_is_not_ours() -> None:
    with RawChild() as other, socket.create_server(("127.0.0.1", 0)) as ours:
        served = other.ask(Serve(host="127.0.0.1", port=0))
        assert isinstance(served, Serving)
        assert is_listening("127.0.0.1", ours.getsockname()[1])
        assert not is_listening("127.0.0.1", served.port)


def test_a_server_ends_with_its_parent_even_while_a_client_is_connected() -> None:
    with RawChild() as child:
        served = child.ask(Serve(host="127.0.0.1", port=0))
        assert isinstance(served, Serving)
        assert child.process.stdin is not None
        with socket.create_connection(("127.0.0.1", served.port), timeout=10):
            child.process.stdin.close()
            assert child.ended() == 0


@pytest.mark.skipif(not rpc_server.TABLE.exists(), reason="only Linux lists its sockets")
def test_each_client_is_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
        seen = [rpc_server._client(port)]
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port)):
                connection, _ = listener.accept()
                with connection:
                    seen.append(rpc_server._client(port))
        assert rpc_server._client(port) == ""
    assert seen[0] == ""
    assert len(set(seen)) == 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts all private memory in RLIMIT_DATA")
@pytest.mark.parametrize(("cap", "tensor"), [(16, 1.97), (24, 3.72), (32, 3.72), (48, 3.72), (96, 3.72), (512, 3.72)])
def test_a_large_cap_has_room_to_receive_experts_of_hundreds_of_gb(cap: int, tensor: float) -> None:
    assert rpc_server._slack_bytes(cap * GIB, 1) > tensor * GIB


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts all private memory in RLIMIT_DATA")
def test_a_small_cap_stays_tight() -> None:
    for cap_bytes in (MIB, GIB, 8 * GIB):
        assert rpc_server._slack_bytes(cap_bytes, 1) <= cap_bytes // 64 + 8 * MIB
