"""Servers that send a byte now and then, at any place of their answer: each wait ends with an error."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from engine.base.errors import EngineError
from engine.library.hub import client, web
from engine.library.hub.card import fetch_card
from engine.library.hub.client import list_repo, search_models
from engine.library.hub.listing import SearchQuery
from engine.library.hub.settings import HubError, HubSettings
from engine.library.hub.web import open_range, open_url
from tests.support.selection import some

HEAD = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-99999/100000\r\nContent-Length: 100000\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PARTS: dict[str, tuple[bytes, bytes]] = {
    "status": (b"", b"HTTP/1.1 2"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"),
    "one header": (b"HTTP/1.1 200 OK\r\nX-A: ", b"a"),
    "bytes": (HEAD, b"x"),
    "length of a chunk": (CHUNKED, b"0"),
    "chunks": (CHUNKED, b"1\r\nx\r\n"),
    "trailers": (CHUNKED + b"1\r\nx\r\n0\r\n", b"X-A: b\r\n"),
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}
"""What comes at once, and what then comes again and again."""


@contextmanager
def dripping(first: bytes, drop: bytes) -> Iterator[str]:
    """Answer every request with `first` and then `drop`, some times a second, without end; yield the address."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()
    clients: list[threading.Thread] = []

    def talk(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(first)
            while not over.wait(0.05):
                for byte in drop:
                    connection.sendall(bytes([byte]))

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                clients.append(threading.Thread(target=talk, args=(connection,), name="drip"))
                clients[-1].start()

    accepting = threading.Thread(target=accept, name="drip-accept")
    accepting.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()
        for each in clients:
            each.join()


def read_all(url: str) -> None:
    with open_url(url, timeout_s=0.5) as response:
        while response.read_some(1 << 16):
            pass


def read_range(url: str) -> None:
    open_range(url, 0, 100_000, timeout_s=0.5)


@pytest.mark.parametrize("read", [read_all, read_range])
@pytest.mark.parametrize("part", some(tuple(PARTS), 3))
def test_a_server_that_drips_is_left(part: str, read: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte came in time, so that whoever waited for the whole waited for ever."""
    monkeypatch.setattr(web, "SHORT_BYTES_PER_S", 1 << 20)
    with dripping(*PARTS[part]) as address, pytest.raises(HubError) as refused:
        read(f"{address}/file")
    assert refused.value.fault in ("timeout", "unreachable")
    assert "127.0.0.1" in refused.value.summary()


def search(hub: HubSettings) -> None:
    search_models(SearchQuery("llama"), hub)


def listing(hub: HubSettings) -> None:
    list_repo("a/b", hub)


def card(hub: HubSettings) -> None:
    fetch_card("a/b", hub)


@pytest.mark.parametrize("ask", [search, listing, card])
@pytest.mark.parametrize("part", some(tuple(PARTS), 2))
def test_a_hub_that_drips_is_left(
    part: str, ask: Callable[[HubSettings], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(web.open_url, "__kwdefaults__", {**(web.open_url.__kwdefaults__ or {}), "timeout_s": 0.5})
    monkeypatch.setattr(web, "SHORT_BYTES_PER_S", 1 << 26)
    with dripping(*PARTS[part]) as address, pytest.raises(EngineError) as refused:
        ask(HubSettings(address, trusted=False))
    assert "127.0.0.1" in refused.value.summary()


@pytest.mark.parametrize(
    ("limit", "value", "most_pages"),
    [("MAX_PAGES", 100, 100), ("MAX_LIST_S", -1.0, 1), ("MAX_LIST_BYTES", 90, 9)],
)
@pytest.mark.parametrize("ask", [search, listing])
def test_a_hub_with_pages_without_end_is_left(
    ask: Callable[[HubSettings], None],
    limit: str,
    value: float,
    most_pages: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Empty pages that each name a next one: nothing of what was wanted ever came, and nobody stopped asking.

    Number, time and size of all pages together are bounded.
    """
    monkeypatch.setattr(client, limit, value)
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            is_list = "/tree/" in self.path or self.path.startswith("/api/models?")
            body = b"[]        " if is_list else b'{"id": "a/b", "sha": "' + b"c" * 40 + b'"}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Link", f'<http://{self.headers["Host"]}{self.path}>; rel="next"')
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            with pytest.raises(HubError, match="an endless list"):
                ask(HubSettings(f"http://127.0.0.1:{server.server_port}", trusted=False))
        finally:
            server.shutdown()
            serving.join()
    assert len(asked) <= most_pages + 1
