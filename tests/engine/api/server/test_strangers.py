"""Limits for clients: connections without a key, body sizes, unread answers, web pages."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.api.server import app as app_module
from engine.api.server import server as server_module
from engine.api.server.guard import MAX_BODIES, Access, Guard, Message, Receive, Scope, Send, key_digest
from engine.api.wire.openai_chat import read_chat
from tests.support.api_server import RunningServer, entry_of, running
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S, wait_until

KEY = "a-key-of-some-length-0123456789"
ORIGIN = "https://app.example"
ASKED = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", n_layers=2)
    access = Access(keys=(key_digest(KEY),), origins=frozenset({ORIGIN}))
    with running([entry_of(path)], access=access) as started:
        started.headers = {"Authorization": f"Bearer {KEY}"}
        started.warm("tiny")
        yield started


def until_closed(connection: socket.socket) -> bytes:
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


# ------------------------------------------------------------------ connections


def test_the_head_of_every_request_has_to_come_in_time(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with server.raw() as later, server.raw() as together:
        for connection in (later, together):
            connection.sendall(whole)
            received = b""
            while not received.endswith(b'{"status":"ok"}'):
                received += connection.recv(65536)
        monkeypatch.setattr(server_module, "HEADER_SECONDS", 0.05)
        later.sendall(b"GET /health HTTP/1.1\r\nHos")
        assert until_closed(later) == b""
        # The beginning of the next one comes with a whole one.
        together.sendall(whole + b"GET /hea")
        assert until_closed(together).count(b"200 OK") == 1


@pytest.mark.parametrize("headers", ["", "Authorization: Bearer wrong\r\n", "Origin: https://evil.example\r\n"])
def test_a_refusal_ends_the_connection(server: RunningServer, headers: str) -> None:
    with server.raw() as connection:
        connection.sendall(f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())
        received = until_closed(connection)
    assert received.split()[1] in (b"401", b"403")
    assert b"connection: close" in received


def stranger(server: RunningServer, asked: bytes) -> socket.socket:
    """Return a connection without a key that has the answer to `asked`."""
    connection = server.raw()
    if asked:
        connection.sendall(asked)
        received = b""
        while not received.endswith(b'{"status":"ok"}'):
            piece = connection.recv(65536)
            assert piece
            received += piece
    return connection


@pytest.mark.parametrize("asked", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_strangers_make_place_for_those_with_a_key(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, asked: bytes
) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 4)
    known = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)

    def ask() -> int:
        known.request("GET", "/v1/models", headers=server.headers)
        reply = known.getresponse()
        reply.read()
        return reply.status

    assert ask() == 200
    socket_before = known.sock
    strangers = [stranger(server, asked) for _ in range(12)]
    try:
        # Each new connection closes the oldest of a stranger, and none of those that have shown a key.
        assert until_closed(strangers[0]) == b""
        assert server.get("/v1/models").status == 200
        assert ask() == 200
        assert known.sock is socket_before
    finally:
        known.close()
        for each in strangers:
            each.close()


def test_strangers_that_come_at_once_close_one_another(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = server.server._server
    assert inner is not None
    connections = inner.server_state.connections
    wait_until(lambda: not connections)
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 4)
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go_on.wait(DEADLINE_S)

    # The loop accepts all of them in one iteration.
    server.server.loop.call_soon_threadsafe(hold)
    assert held.wait(DEADLINE_S)
    strangers = [server.raw() for _ in range(12)]
    go_on.set()
    try:
        assert [until_closed(each) for each in strangers[:8]] == [b""] * 8
        assert len(connections) == 4
    finally:
        for each in strangers:
            each.close()


def test_the_end_of_an_answer_that_nobody_takes_is_dropped(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SEND_SECONDS", 0.05)
    body = json.dumps({"content": "word " * 60_000, "with_pieces": True}).encode()
    head = (
        f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n"
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head.encode() + b"\r\n" + body)
        inner = server.server._server
        assert inner is not None
        wait_until(lambda: any(entry.path == "/tokenize" for entry in server.server.journal.ended))
        # Nothing is read, and still the server holds no connection.
        wait_until(lambda: not inner.server_state.connections)


def test_a_stop_closes_a_connection_whose_client_takes_nothing(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", n_layers=2)
    body = json.dumps({"content": "word " * 60_000, "with_pieces": True}).encode()
    head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with running([entry_of(path)]) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head.encode() + body)
        inner = server.server._server
        assert inner is not None
        wait_until(lambda: any(entry.path == "/tokenize" for entry in server.server.journal.ended))
        server.server.stop()
        assert not inner.server_state.connections


# ------------------------------------------------------------------ bodies


def test_large_bodies_are_read_by_few_threads(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go, lock = threading.Event(), threading.Lock()
    now, most = 0, 0

    def slow(body: bytes):  # type: ignore[no-untyped-def]
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
            if now == app_module.READERS:
                may_go.set()
        may_go.wait()
        with lock:
            now -= 1
        return read_chat(body)

    monkeypatch.setattr("engine.api.server.app.read_chat", slow)
    large = ASKED[:-1] + b', "user": "' + b"a" * (1 << 17) + b'"}'
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda _: server.post("/v1/chat/completions", large), range(8)))
    assert {reply.status for reply in replies} == {200}
    assert most == app_module.READERS


def test_bodies_of_all_requests_have_a_bound() -> None:
    held: list[asyncio.Event] = []

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        held.append(asyncio.Event())
        await held[-1].wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(guard: Guard) -> int:
        answers: list[Message] = []
        body: list[Message] = [{"type": "http.request", "body": b"a" * 1000, "more_body": False}]

        async def receive() -> Message:
            return body.pop()

        async def send(message: Message) -> None:
            answers.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": [(b"host", b"localhost")]}
        try:
            await guard(scope, receive, send)
        except Exception as error:
            return int(getattr(error, "status", 0))
        return int(answers[0]["status"])

    async def check() -> None:
        guard = Guard(app, Access(max_body_bytes=1000))
        under_way = [asyncio.ensure_future(ask(guard)) for _ in range(MAX_BODIES)]
        while len(held) < MAX_BODIES:
            await asyncio.sleep(0)
        assert await ask(guard) == 503
        for each in held:
            each.set()
        assert await asyncio.gather(*under_way) == [200] * MAX_BODIES
        again = asyncio.ensure_future(ask(guard))
        while len(held) == MAX_BODIES:
            await asyncio.sleep(0)
        held[-1].set()
        assert await again == 200

    asyncio.run(check())


# ------------------------------------------------------------------ web pages


def preflight(server: RunningServer, names: str, **headers: str) -> dict[str, str]:
    asked = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": names,
        **headers,
    }
    reply = RunningServer(server.server).request("OPTIONS", "/v1/chat/completions", headers=asked)
    assert reply.status == 204
    return reply.headers


def test_clients_for_javascript_may_send_their_headers(server: RunningServer) -> None:
    openai = (
        "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
        "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout,"
        "x-stainless-helper-method,openai-organization,openai-project"
    )
    anthropic = "anthropic-version,anthropic-beta,anthropic-dangerous-direct-browser-access,x-api-key"
    for names in (openai, anthropic):
        allowed = preflight(server, names)["access-control-allow-headers"]
        assert allowed.replace(" ", "") == names


def test_other_headers_are_not_allowed(server: RunningServer) -> None:
    allowed = preflight(server, "Authorization, cookie, x-forwarded-for, x-stainless-\xe9, *")
    assert allowed["access-control-allow-headers"] == "authorization"
    assert "access-control-allow-private-network" not in allowed
    assert preflight(server, "")["access-control-allow-headers"] == "authorization, content-type"


def test_a_page_of_an_allowed_origin_may_reach_this_network(server: RunningServer) -> None:
    headers = preflight(server, "", **{"Access-Control-Request-Private-Network": "true"})
    assert headers["access-control-allow-private-network"] == "true"
    assert headers["access-control-allow-origin"] == ORIGIN


def test_a_key_with_a_newline_is_no_key(server: RunningServer, tmp_path: Path) -> None:
    head = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY[:5]}\r\n {KEY[5:]}\r\n\r\n"
    with server.raw() as connection:
        connection.sendall(head.encode())
        assert until_closed(connection).split()[1] in (b"400", b"401")
