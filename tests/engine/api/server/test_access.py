"""Access to the API server: keys, names, origins, sizes, and misbehaving clients."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.api.server import server as server_module
from engine.api.server.asking import MAX_UNREAD_CHARACTERS
from engine.api.server.guard import Access, key_digest
from engine.api.server.server import Address, ApiServer
from engine.base.errors import ArgumentError
from tests.support.api_server import RunningServer, entry_of, running
from tests.support.models import write_tiny_llama

KEY = "a-key-of-some-length-0123456789"
ORIGIN = "http://localhost:3000"
ASKED = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", n_layers=2)
    access = Access(
        keys=(key_digest("another-key-0123456789"), key_digest(KEY)),
        origins=frozenset({ORIGIN}),
        hosts=frozenset({"box.example"}),
        max_body_bytes=1 << 20,
    )
    with running([entry_of(path)], access=access) as started:
        started.headers = {"Authorization": f"Bearer {KEY}"}
        started.warm("tiny")
        yield started


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": "Bearer "},
        {"x-api-key": KEY[:-1]},
        {"x-api-key": "\xff\xfe"},
    ],
)
def test_a_key_is_needed(server: RunningServer, headers: dict[str, str]) -> None:
    server_without = RunningServer(server.server)
    reply = server_without.request("GET", "/v1/models", headers=headers)
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert server_without.get("/health").status == 200


def test_a_refused_request_is_in_the_journal(server: RunningServer) -> None:
    """People look there for the reason why their client gets no answer."""
    journal = server.server.journal
    path = "/v1/models/" + "x" * 1000
    assert RunningServer(server.server).request("GET", path).status == 401
    (entry,) = [each for each in journal.ended if each.path.startswith("/v1/models/x")]
    assert (entry.status, entry.code, entry.client, entry.model) == (401, "invalid_api_key", "127.0.0.1", "")
    assert len(entry.path) == 200


def test_a_key_in_either_header(server: RunningServer) -> None:
    assert server.get("/v1/models").status == 200
    assert RunningServer(server.server).get("/v1/models", **{"x-api-key": KEY}).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "192.0.2.1", "[", "@"]
)
def test_other_names_of_the_server_are_refused(server: RunningServer, host: str) -> None:
    reply = server.get("/v1/models", Host=host)
    assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:8080", "127.1.2.3", "box.example", "localhost."]
)
def test_names_of_the_server(server: RunningServer, host: str) -> None:
    assert server.get("/v1/models", Host=host).status == 200


def test_addresses_are_names_of_a_server_that_others_reach() -> None:
    access = Access(is_loopback=False)
    assert access.knows_host("192.0.2.1:8080")
    assert access.knows_host("[2001:db8::1]")
    assert not access.knows_host("evil.example")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3001", "https://localhost:3000"])
def test_web_pages_of_other_origins_are_refused(server: RunningServer, origin: str) -> None:
    reply = server.post("/v1/chat/completions", ASKED, {"Origin": origin})
    assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in reply.headers


def test_a_web_page_that_is_allowed(server: RunningServer) -> None:
    asked = RunningServer(server.server).request(
        "OPTIONS", "/v1/chat/completions", headers={"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    )
    assert asked.status == 204
    assert asked.headers["access-control-allow-origin"] == ORIGIN
    reply = server.get("/v1/models", Origin=ORIGIN)
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, ORIGIN)
    # A page can read why it was refused.
    refused = RunningServer(server.server).get("/v1/models", Origin=ORIGIN)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)


def _sent(server: RunningServer, data: bytes) -> bytes:
    """Send bytes, and return what comes until the server closes."""
    with server.raw() as connection:
        connection.sendall(data)
        received = b""
        while True:
            try:
                piece = connection.recv(65536)
            except ConnectionResetError:
                return received
            if not piece:
                return received
            received += piece


def _head(server: RunningServer, *lines: str) -> bytes:
    always = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}"]
    return "\r\n".join([*always, *lines, "", ""]).encode()


def test_a_body_of_200_mb_is_refused_before_it_is_read(server: RunningServer) -> None:
    assert _sent(server, _head(server, f"Content-Length: {200 << 20}")).startswith(b"HTTP/1.1 413 ")


def test_a_body_without_a_length_is_cut_off_at_the_limit(server: RunningServer) -> None:
    chunk = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
    data = _head(server, "Transfer-Encoding: chunked") + chunk * 17
    assert b"413" in _sent(server, data)[:20]


def test_a_body_that_does_not_come_ends(tmp_path: Path) -> None:
    # A server of its own: on a busy machine other tests need longer between the headers and the body.
    entry = entry_of(write_tiny_llama(tmp_path / "tiny.gguf", n_layers=2))
    with running([entry], access=Access(keys=(key_digest(KEY),), body_seconds=0.05)) as impatient:
        assert _sent(impatient, _head(impatient, "Content-Length: 10")).startswith(b"HTTP/1.1 408 ")


def test_headers_that_are_too_many_or_too_long(server: RunningServer) -> None:
    many = [f"X-{number}: a" for number in range(200)]
    assert _sent(server, _head(server, *many, "Content-Length: 0", "Connection: close")).startswith(b"HTTP/1.1 431 ")
    long = _sent(server, _head(server, f"X-Long: {'a' * (64 << 10)}", "Content-Length: 0", "Connection: close"))
    assert long == b"" or long.startswith(b"HTTP/1.1 400 ")


def test_compressed_bodies_are_refused(server: RunningServer) -> None:
    reply = server.post("/v1/chat/completions", b"\x1f\x8b", {"Content-Encoding": "gzip"})
    assert (reply.status, reply.error["code"]) == (415, "content_encoding")


def test_two_hosts_are_refused(server: RunningServer) -> None:
    data = _head(server, "Host: evil.example", "Content-Length: 0", "Connection: close")
    assert _sent(server, data).split()[1] in (b"400", b"403")


def test_connections_that_say_nothing_are_closed(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEADER_SECONDS", 0.05)
    assert _sent(server, b"") == b""
    assert _sent(server, b"GET /health HTT") == b""


def test_bytes_of_any_kind_break_nothing(server: RunningServer) -> None:
    maker = random.Random(1)
    whole = _head(server, f"Content-Length: {len(ASKED)}", "Connection: close") + ASKED
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(maker.randrange(1, 6)):
            place = maker.randrange(len(data))
            match maker.randrange(3):
                case 0:
                    data[place] = maker.randrange(256)
                case 1:
                    del data[place : place + maker.randrange(1, 9)]
                case _:
                    data[place:place] = maker.randbytes(maker.randrange(1, 9))
        with server.raw() as connection:
            connection.sendall(bytes(data))
            connection.shutdown(socket.SHUT_WR)
            received = b""
            while piece := _piece(connection):
                received += piece
        assert not received or received.startswith(b"HTTP/1.1 "), bytes(data)
        assert not received.startswith(b"HTTP/1.1 500"), bytes(data)
    assert server.get("/v1/models").status == 200


def _piece(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionResetError:
        return b""


def test_mutated_requests_are_answered_or_refused(server: RunningServer) -> None:
    maker = random.Random(2)
    whole = (
        b'{"model": "tiny", "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type":'
        b' "text", "text": "b"}]}], "max_tokens": 1, "temperature": 0.5, "stop": ["x"], "tools": [{"type": "function",'
        b' "function": {"name": "f", "parameters": {"type": "object"}}}], "stream": false, "n": 1, "seed": 5}'
    )
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(maker.randrange(1, 5)):
            place = maker.randrange(len(data))
            data[place : place + maker.randrange(3)] = maker.choice(
                [
                    b"",
                    b'"',
                    b"{",
                    b"}",
                    b"[",
                    b"null",
                    b"-1",
                    b"1e400",
                    b"true",
                    b"\\u0000",
                    b"\xf0",
                    maker.randbytes(2),
                ]
            )
        reply = server.post("/v1/chat/completions", bytes(data))
        assert reply.status in (200, 400, 404), (bytes(data), reply.body)


class _Stopped:
    """A session that notes which request was stopped."""

    def __init__(self) -> None:
        self.receivers: list[object] = []
        self.stopped: list[int | None] = []

    def ask(self, _request: object, receiver: object) -> int:
        self.receivers.append(receiver)
        return 7

    def stop(self, request: int | None) -> None:
        self.stopped.append(request)


def test_an_answer_that_nobody_takes_is_stopped_at_a_bounded_size() -> None:
    from engine.api.server.asking import Requests, TooSlowError
    from engine.runtime.protocol.requests import Generate
    from engine.runtime.session.events import Token

    session = _Stopped()

    class Model:
        pass

    model = Model()
    model.session = session  # type: ignore[attr-defined]

    async def read() -> None:
        requests = Requests(model, [Generate(prompt="a")])  # type: ignore[arg-type]
        (receiver,) = session.receivers
        for _ in range(MAX_UNREAD_CHARACTERS // 1000 + 100):
            receiver(Token(text="a" * 1000, request=7))  # type: ignore[operator]
        unread = [event.text for _, event in requests._events if isinstance(event, Token)]
        assert len("".join(unread)) <= MAX_UNREAD_CHARACTERS
        with pytest.raises(TooSlowError):
            await requests.next()

    asyncio.run(read())
    assert session.stopped == [7]


def test_a_port_without_rights_is_a_sentence(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(socket.socket):
        def bind(self, _place: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Refusing)
        other = ApiServer(Address(port=80), Access(), server.server.pool, version="", journal=server.server.journal)
        with pytest.raises(ArgumentError, match="ports below 1024 need rights"):
            other.start()


def test_a_port_in_use_is_a_sentence(server: RunningServer, tmp_path: Path) -> None:
    other = ApiServer(
        Address(port=server.port), Access(), server.server.pool, version="", journal=server.server.journal
    )
    with pytest.raises(ArgumentError, match="another program uses this port"):
        other.start()
    nowhere = Address(host="192.0.2.1", port=0)
    with pytest.raises(ArgumentError, match="does not have this address"):
        ApiServer(nowhere, Access(), server.server.pool, version="", journal=server.server.journal).start()
    wrong = Address(certificate=str(tmp_path / "none.pem"), private_key=str(tmp_path / "none.pem"), port=0)
    with pytest.raises(ArgumentError, match="certificate"):
        ApiServer(wrong, Access(), server.server.pool, version="", journal=server.server.journal).start()
