"""Requests during a load: pings, clients that disconnect, lost models; and idle times of each kind of request."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from engine.api.server import exchange as exchange_module
from engine.api.server import pooled_model
from engine.api.server.answering import send_answers
from engine.api.server.exchange import Endpoint, Exchange
from engine.api.server.guard import Access, Message
from engine.api.server.journal import Journal
from engine.api.server.pool import ModelPool
from engine.api.server.pool_functions import PoolFunctions
from engine.api.server.server import Address, ApiServer
from engine.api.wire.answer import PING, PlainReader
from engine.api.wire.completions import CompletionRequest, CompletionWriter
from engine.api.wire.errors import ApiError
from engine.api.wire.names import ModelEntry
from engine.base.errors import ArgumentError
from engine.base.values import replace
from engine.devices.device import Rig
from engine.runtime.protocol.requests import STREAM_INTERVAL_S, WHOLE_INTERVAL_S, Generate, Tokenise
from engine.runtime.session.events import Done, Reading, Token
from engine.runtime.session.load_spec import LoadSpec
from engine.runtime.session.session import ModelSession
from tests.support.api_server import CONTEXT, Reply, RunningServer, cpu_rig, entry_of, plan_on_cpu, running
from tests.support.models import write_tiny_llama
from tests.support.patience import wait_until

STREAMED = b'{"model": "%s", "messages": [{"role": "user", "content": "Hi"}], "stream": true, "max_tokens": 2}'


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    first, second = (write_tiny_llama(folder / f"{name}.gguf", n_layers=2, seed=1) for name in ("first", "second"))
    return first, second


def ask(server: RunningServer, model: str, **further: object) -> Reply:
    asked = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **further}
    return server.post("/v1/chat/completions", asked)


def state(server: RunningServer, model: str) -> dict[str, Any]:
    found = server.get("/v1/layerdeck/status").document["models"].get(model, {})
    assert isinstance(found, dict)
    return found


def unload_in_s(server: RunningServer, model: str) -> float | None:
    """Return the idle time that is left. An answer may be there a moment before its request has ended."""
    while (found := state(server, model))["requests"]:
        pass
    left_s: float | None = found["unload_in_s"]
    return left_s


def sent(body: bytes, path: str = "/v1/chat/completions") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Gate:
    """A plan that waits, and notes what was planned."""

    def __init__(self) -> None:
        self.may_plan, self.planned = threading.Event(), list[str]()

    def plan(self, entry: ModelEntry, rig: Rig) -> LoadSpec:
        self.planned.append(entry.id)
        self.may_plan.wait()
        return plan_on_cpu(entry, rig)


# ------------------------------------------------------------------ pings


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", STREAMED % b"first"),
        ("/v1/responses", b'{"model": "first", "input": "Hi", "stream": true, "max_output_tokens": 2}'),
        ("/v1/messages", STREAMED % b"first"),
        ("/v1/completions", b'{"model": "first", "prompt": "Hi", "stream": true, "max_tokens": 2}'),
    ],
)
def test_a_stream_is_kept_open_while_its_model_loads(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, path: str, body: bytes
) -> None:
    monkeypatch.setattr(exchange_module, "PING_S", 0.02)
    gate = Gate()
    with running([entry_of(paths[0])], plan=gate.plan) as server, server.raw() as connection:
        connection.sendall(sent(body, path))
        received = b""
        while received.count(b": ping\n\n") < 2:
            received += connection.recv(4096)
        assert received.startswith(b"HTTP/1.1 200 OK")
        gate.may_plan.set()
        while b"\r\n0\r\n\r\n" not in received:
            received += connection.recv(4096)
    assert b"data: {" in received
    assert b'"error":{' not in received


def test_a_load_that_fails_after_pings_ends_the_stream_with_an_error(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "PING_S", 0.02)
    may_fail = threading.Event()

    def plan(_entry: ModelEntry, _rig: Rig) -> LoadSpec:
        may_fail.wait()
        raise ArgumentError("The layout cannot be used.")

    with running([entry_of(paths[0])], plan=plan) as server, server.raw() as connection:
        connection.sendall(sent(STREAMED % b"first"))
        received = b""
        while b": ping\n\n" not in received:
            received += connection.recv(4096)
        may_fail.set()
        while b"\r\n0\r\n\r\n" not in received:
            received += connection.recv(4096)
        assert b'data: {"error":{"message":"The layout cannot be used."' in received
        (entry,) = server.ended
        assert (entry.status, entry.code) == (200, "argument")


class Silent:
    """A session in which a prompt is read, and nothing is said."""

    def __init__(self) -> None:
        self.receivers: list[Any] = []
        self.requests: list[Any] = []

    def ask(self, request: object, receiver: object) -> int:
        self.receivers.append(receiver)
        self.requests.append(request)
        return 1

    def stop(self, _request: int | None) -> None:
        pass


def test_a_stream_is_kept_open_while_a_long_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "PING_S", 0.02)
    session, got = Silent(), list[bytes]()

    class Model:
        id, n_ctx = "m", 10

    model: Any = Model()
    model.session = session

    async def send(message: Message) -> None:
        got.append(message.get("body", b""))

    async def check() -> None:
        exchange = Exchange({"path": "/"}, send, b"", Journal().begin("", "/"))
        writer = CompletionWriter("1", "m", 0, CompletionRequest(prompt="a"), ["a"])
        writing = asyncio.ensure_future(
            send_answers(
                exchange, model, [Generate(prompt="a")], [PlainReader()], [Tokenise(text="a")], writer, streams=True
            )
        )
        while not session.receivers:
            await asyncio.sleep(0)
        (receiver,) = session.receivers
        n_read = 0
        # A sign of progress comes more often than a ping is due.
        while got.count(b": ping\n\n") < 3:
            n_read += 1
            receiver(Reading(request=1, read_tokens=n_read, prompt_tokens=1 << 30, cached_tokens=0))
            await asyncio.sleep(0.001)
        receiver(Token(text="b", request=1))
        receiver(
            Done(
                prompt_tokens=1, generated_tokens=1, prompt_tokens_per_second=1.0, generation_tokens_per_second=1.0,
                stop_reason="length", request=1,
            )
        )  # fmt: skip
        await writing
        exchange.close()

    asyncio.run(check())
    assert b'"text":"b"' in b"".join(got)


@pytest.mark.parametrize(("streams", "interval_s"), [(True, STREAM_INTERVAL_S), (False, WHOLE_INTERVAL_S)])
def test_the_text_of_an_answer_that_is_sent_whole_may_come_late(*, streams: bool, interval_s: float) -> None:
    session = Silent()
    model: Any = SimpleNamespace(id="m", n_ctx=10, session=session)

    async def send(_message: Message) -> None:
        pass

    async def check() -> None:
        exchange = Exchange({"path": "/"}, send, b"", Journal().begin("", "/"))
        writer = CompletionWriter("1", "m", 0, CompletionRequest(prompt="a"), ["a"])
        asked, counting = [Generate(prompt="a")], [Tokenise(text="a")]
        writing = asyncio.ensure_future(
            send_answers(exchange, model, asked, [PlainReader()], counting, writer, streams=streams)
        )
        while not session.requests:
            await asyncio.sleep(0)
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing
        exchange.close()

    asyncio.run(check())
    assert [request.text_interval_s for request in session.requests] == [interval_s]


@pytest.mark.parametrize("fails", [False, True])
def test_no_sign_of_life_follows_the_end_of_an_answer(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The sign is due, and the answer ends or fails before it is sent."""
    monkeypatch.setattr(exchange_module, "PING_S", 0.0)
    got = list[Message]()

    async def send(message: Message) -> None:
        await asyncio.sleep(0)
        got.append(message)

    async def check() -> None:
        exchange = Exchange({"path": "/"}, send, b"", Journal().begin("", "/"))
        if not fails:
            await exchange.begin_stream()
        exchange.keep_open(lambda _error: b"")
        exchange._ping_if_silent()
        if fails:
            await exchange.fail(ApiError(503, "It is gone."))
        else:
            await exchange.end_stream(b"end")
        assert exchange._ping is not None
        await exchange._ping
        exchange.close()

    asyncio.run(check())
    assert not any(message.get("body") == PING for message in got)


def test_a_stream_that_ends_with_an_error_has_failed() -> None:
    journal = Journal()

    async def send(_message: Message) -> None:
        """The client takes everything."""

    async def run(error: ApiError | None) -> None:
        exchange = Exchange({"path": "/"}, send, b"", journal.begin("", "/"))
        exchange.keep_open(lambda _error: b"")
        await exchange.begin_stream()
        await (exchange.end_stream(b"") if error is None else exchange.fail(error))
        exchange.close()

    asyncio.run(run(None))
    asyncio.run(run(ApiError(503, "It is gone.", code="model_lost")))
    assert [(entry.status, entry.code) for entry in journal.ended] == [(200, ""), (200, "model_lost")]
    assert (journal.totals.requests, journal.totals.failed) == (2, 1)


# ------------------------------------------------------------------ clients that leave


def test_a_request_ends_if_its_client_is_gone_before_the_error() -> None:
    journal = Journal()

    async def handle(_exchange: Exchange) -> None:
        raise ApiError(503, "It is gone.")

    async def send(_message: Message) -> None:
        raise ConnectionResetError

    bodies = [{"type": "http.request", "body": b""}]

    async def receive() -> Message:
        return bodies.pop() if bodies else await asyncio.Future()

    asyncio.run(Endpoint(journal, handle)({"path": "/"}, receive, send))
    assert journal.under_way == ()
    assert [entry.code for entry in journal.ended] == ["client_gone"]


def test_nothing_is_loaded_for_clients_that_have_left(paths: tuple[Path, Path]) -> None:
    gate = Gate()
    with running(list(map(entry_of, paths)), plan=gate.plan) as server, ThreadPoolExecutor(1) as threads:
        first = threads.submit(ask, server, "first")
        wait_until(lambda: gate.planned == ["first"])
        with server.raw() as connection:
            connection.sendall(sent(STREAMED % b"second"))
            wait_until(lambda: state(server, "second").get("waiting") == 1)
        wait_until(lambda: not state(server, "second")["waiting"])
        gate.may_plan.set()
        assert first.result().status == 200
        assert ask(server, "first").status == 200
    assert gate.planned == ["first"]


def test_a_model_does_not_go_for_a_client_that_has_left(paths: tuple[Path, Path]) -> None:
    rig = cpu_rig()
    (row,) = plan_on_cpu(entry_of(paths[0]), rig).plan.forecast
    size_bytes = row.need_bytes * 3 // 2 + rig.host.margin_bytes
    small = Rig((), replace(rig.host, total_bytes=size_bytes, free_bytes=size_bytes))
    may_plan, planning = threading.Event(), threading.Event()

    def plan(entry: ModelEntry, rig: Rig) -> LoadSpec:
        if entry.id == "second":
            planning.set()
            may_plan.wait()
        return plan_on_cpu(entry, rig)

    with running(list(map(entry_of, paths)), plan=plan, rig=lambda: small) as server:
        assert ask(server, "first").status == 200
        with server.raw() as connection:
            connection.sendall(sent(STREAMED % b"second"))
            planning.wait()
        wait_until(lambda: not state(server, "second")["waiting"])
        may_plan.set()
        wait_until(lambda: state(server, "second")["state"] == "unloaded")
        assert state(server, "first")["state"] == "loaded"


# ------------------------------------------------------------------ memory of lost models


def test_a_model_that_is_lost_while_it_answers_holds_no_memory(
    paths: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with running([entry_of(paths[0])]) as server:
        assert ask(server, "first").status == 200
        assert server.server.pool.holdings().own
        body = b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true, "max_tokens": 400}'
        children = [each for each in psutil.Process().children() if "engine.runtime.child" in each.cmdline()]
        with server.raw() as connection:
            connection.sendall(sent(body))
            received = b""
            while b'"content":"' not in received:
                received += connection.recv(512)
            os.kill(children[0].pid, signal.SIGKILL)
            while server.server.pool.holdings().own:
                connection.recv(65536)
        assert ask(server, "first").status == 200
        assert len(server.server.pool.holdings().own) == 1
    caplog.clear()


# ------------------------------------------------------------------ names and idle times


def test_an_id_comes_before_another_name_of_a_loaded_model(paths: tuple[Path, Path]) -> None:
    first = replace(entry_of(paths[0]), names=("second", "both"))
    second = replace(entry_of(paths[1]), names=("both",))
    with running([first, second]) as server:
        assert ask(server, "first").document["model"] == "first"
        assert ask(server, "second").document["model"] == "second"
        both = ask(server, "both")
        assert (both.status, both.error["code"]) == (400, "model_ambiguous")


@contextmanager
def serving(entries: Sequence[ModelEntry], **times: Any) -> Iterator[RunningServer]:
    pool = ModelPool(PoolFunctions(lambda: entries, cpu_rig, plan_on_cpu), **times)
    server = ApiServer(Address(port=0), Access(), pool, version="", journal=Journal())
    server.start()
    try:
        yield RunningServer(server)
    finally:
        server.stop()


def test_a_model_that_is_named_at_the_start_waits_for_its_first_answer(paths: tuple[Path, Path]) -> None:
    entry = entry_of(paths[0])
    with serving([entry], keep_alive_s=0.0, pinned_s=0.0, pinned=["first"]) as server:
        server.server.preload(entry).result()
        assert state(server, "first")["state"] == "loaded"
        assert unload_in_s(server, "first") is None
        assert ask(server, "first").status == 200
        wait_until(lambda: state(server, "first")["state"] == "unloaded")


def test_the_server_ends_after_the_children_that_it_is_unloading(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    close, begun, may_end, closed = ModelSession.close, threading.Event(), threading.Event(), list[ModelSession]()

    def close_late(session: ModelSession) -> None:
        begun.set()
        may_end.wait()
        close(session)
        closed.append(session)

    monkeypatch.setattr(ModelSession, "close", close_late)
    with serving([entry_of(paths[0])], keep_alive_s=0.0) as server:
        assert ask(server, "first").status == 200
        begun.wait()
        server.server.loop.call_soon_threadsafe(lambda: server.server.loop.call_later(0.2, may_end.set))
    assert closed


def test_a_model_has_an_idle_time_of_its_own(paths: tuple[Path, Path]) -> None:
    with serving([replace(entry_of(paths[0]), keep_alive_s=1800.0)], keep_alive_s=60.0) as server:
        assert ask(server, "first").status == 200
        assert 60 < (unload_in_s(server, "first") or 0) <= 1800


def test_a_model_stays_at_least_as_long_as_it_took_to_load(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [pooled_model.default_keep_alive_s(load_s) for load_s in (0.0, 20.0, 900.0)] == [300.0, 300.0, 900.0]
    monkeypatch.setattr(pooled_model, "default_keep_alive_s", lambda load_s: 1e6 if load_s > 0 else 300.0)
    with serving([entry_of(paths[0])]) as server:
        assert ask(server, "first").status == 200
        assert (unload_in_s(server, "first") or 0) > 300
    with serving([entry_of(paths[0])], keep_alive_s=60.0) as server:
        assert ask(server, "first").status == 200
        assert (unload_in_s(server, "first") or 0) <= 60, "a chosen idle time holds"


REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/tokenize": {"content": "Hi"},
    "/detokenize": {"tokens": [1]},
}


def test_every_kind_of_request_has_an_idle_time(paths: tuple[Path, Path]) -> None:
    with running([entry_of(paths[0])]) as server:
        for number, (path, document) in enumerate(REQUESTS.items(), start=1):
            reply = server.post(path, {"model": "first", "keep_alive": f"{number}h", **document})
            assert reply.status == 200, reply.body
            left_s = unload_in_s(server, "first")
            assert left_s is not None
            assert 3600 * (number - 1) < left_s <= 3600 * number, path
            wrong = server.post(path, {"model": "first", "keep_alive": "soon", **document})
            assert wrong.status == 400, path


# ------------------------------------------------------------------ what is told


def test_what_is_not_loaded_says_what_it_would_take(paths: tuple[Path, Path]) -> None:
    rig = cpu_rig()
    (row,) = plan_on_cpu(entry_of(paths[0]), rig).plan.forecast
    size_bytes = row.need_bytes * 3 // 2 + rig.host.margin_bytes
    small = Rig((), replace(rig.host, total_bytes=size_bytes, free_bytes=size_bytes))
    large = replace(entry_of(paths[1]), id="large")
    broken = ModelEntry("broken", paths[0].parent / "none.gguf")

    def plan(entry: ModelEntry, rig: Rig) -> LoadSpec:
        n_ctx = 400_000 if entry.id == "large" else CONTEXT.n_ctx
        return plan_on_cpu(entry, rig, msgspec.structs.replace(CONTEXT, n_ctx=n_ctx))

    with running([*map(entry_of, paths), large, broken], rig=lambda: small, plan=plan) as server:
        first = server.get("/v1/models/first").document
        assert (first["fits"], first["unloads"], first["missing"]) == ("yes", [], [])
        assert first["forecast"][0]["need_bytes"] == row.need_bytes
        assert first["layout"]["context"]["n_ctx"] == CONTEXT.n_ctx
        assert ask(server, "first").status == 200
        wait_until(lambda: not any(each.get("fits", "") is None for each in server.get("/v1/models").document["data"]))
        listed = {each["id"]: each for each in server.get("/v1/models").document["data"]}
        assert "fits" not in listed["first"]
        assert (listed["second"]["fits"], listed["second"]["unloads"]) == ("after_unloading", ["first"])
        assert listed["large"]["fits"] == "no"
        assert listed["large"]["missing"][0]["missing_bytes"] > 0
        assert listed["broken"]["fits"] == "no"
        assert listed["broken"]["reason"]


def test_tokens_of_several_prompts_are_added(paths: tuple[Path, Path]) -> None:
    with running([entry_of(paths[0])]) as server:
        asked = {"prompt": ["One", "Two and some more"], "n": 2, "max_tokens": 1}
        usage = server.post("/v1/completions", asked).document["usage"]
        entry = server.ended[-1]
        assert (entry.prompt_tokens, entry.answer_tokens) == (usage["prompt_tokens"], 4)
        assert server.server.journal.totals.prompt_tokens == usage["prompt_tokens"]
        asked = {"messages": [{"role": "user", "content": "Hi"}], "n": 3, "max_tokens": 1}
        usage = server.post("/v1/chat/completions", asked).document["usage"]
        assert server.ended[-1].prompt_tokens == usage["prompt_tokens"]


def test_a_fault_of_this_computer_is_not_a_client_that_left(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running([entry_of(paths[0])]) as server:

        async def entries() -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(server.server.pool, "entries", entries)
        reply = server.get("/v1/models")
        assert (reply.status, reply.error["code"]) == (500, "internal")
        assert server.ended[-1].status == 500
    caplog.clear()


def test_a_text_of_any_length_is_refused_before_it_is_counted(paths: tuple[Path, Path]) -> None:
    long = "a" * (1 << 20)
    with running([entry_of(paths[0])]) as server:
        server.warm("first")
        for path, document in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
            ("/v1/completions", {"prompt": long}),
            ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": long}]}),
        ):
            reply = server.post(path, document)
            error = reply.document["error"]
            assert (reply.status, error["n_prompt_tokens"], error["n_ctx"]) == (400, (1 << 20) // 256, 512), path
        assert server.post("/tokenize", {"content": "a" * (5 << 20)}).status == 400


def test_a_list_without_devices_says_that_nothing_is_known(paths: tuple[Path, Path]) -> None:
    def no_rig() -> Rig:
        raise NotImplementedError

    with running([entry_of(paths[0])], rig=no_rig) as server:
        (model,) = server.get("/v1/models").document["data"]
        assert (model["state"], model["fits"]) == ("unloaded", None)
        assert server.get("/v1/models/first").document["fits"] is None
