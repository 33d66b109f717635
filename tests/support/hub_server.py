"""A Hugging Face hub on 127.0.0.1 for tests: search, file trees, cards, files with ranges, and faults.

`HubServer` answers the requests of huggingface_hub and llama.cpp. A file request is redirected to a signed link, as on
the real hub. A `Fault` changes the answer to the next request for a file.
"""

from __future__ import annotations

import hashlib
import json
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

from msgspec import Struct, field

PIECE_BYTES = 16 * 1024
"""Bytes sent at a time. With the send buffer this limits the unread bytes of a connection."""
COMMIT = "c" * 40
XET_PATH = "/xet"
"""Path of the hub's Xet storage. This server answers nothing there."""
_LOOK_S = 0.05
_DRIP_BYTES = 10
FaultKind = Literal[
    "cut", "stall", "corrupt", "short", "long", "no_ranges", "range_refused", "busy", "broken", "expired", "redirect",
    "no_length", "web_page", "drip",
]  # fmt: skip


class Fault(Struct, frozen=True):
    """A fault of the answer to a request for a file, after `after_bytes` of it.

    cut: the connection ends.
    stall: nothing more is sent.
    corrupt: a byte is changed.
    short, long: the length is wrong.
    drip: 200 bytes per second.
    no_ranges: status 200 with the whole file.
    range_refused, busy, broken, expired: status 416, 429, 503, and 403 of a signed link.
    redirect: to `target`.

    `wait_s`: value of the header Retry-After; None: without it.
    """

    kind: FaultKind
    after_bytes: int = 0
    target: str = ""
    wait_s: int | None = None


class Repo(Struct, dict=True):
    """A repository of the hub.

    `files`: content by path, bytes or a `Path`. May change while the server runs. A `Path` is for headers of large
    models: the file has holes for weights, and its hash is made up.
    `gated`: requests need the token.
    """

    name: str
    files: dict[str, Any]
    commit: str = COMMIT
    gated: bool = False
    downloads: int = 1000
    likes: int = 10
    tags: tuple[str, ...] = ("gguf", "license:mit")
    gguf: dict[str, Any] = field(default_factory=lambda: {"architecture": "llama", "context_length": 4096})
    card: str = "---\nlicense: mit\n---\n# A model\n"


class Asked(Struct, frozen=True):
    """A request that the server received."""

    path: str
    range: str | None
    token: str | None


class SentRange(Struct):
    """A range of a file that an answer has sent. `end`: first byte after it."""

    path: str
    first: int
    end: int


class HubServer:
    """The running server. `url`: for HF_ENDPOINT. `asked`: the received requests."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.token = "hf_right"
        self.faults: deque[Fault] = deque()
        self.asked: list[Asked] = []
        self.sent: list[SentRange] = []
        """In the order in which the answers began."""
        self.at_bytes: Callable[[int], None] | None = None
        """Called before each piece with the number of bytes that the answer has sent so far."""
        self.closing = threading.Event()
        self.change: Callable[[object], bytes] | None = None
        """Returns the body to send in place of a document of the hub's API; None: no change."""
        self.plain: dict[str, bytes] = {}
        """Files of an ordinary web server, by name, at /plain/NAME."""
        self.plain_etag: str | None = '"first"'
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="hub-server")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def add(self, repo: Repo) -> Repo:
        self.repos[repo.name] = repo
        return repo

    def file_url(self, repo: str, path: str) -> str:
        return f"{self.url}/{repo}/resolve/{self.repos[repo].commit}/{path}"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End all answers, and wait for their threads."""
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def bytes_sent(self, path: str) -> int:
        return sum(each.end - each.first for each in self.sent if each.path == path)


@contextmanager
def hub_server(*repos: Repo) -> Iterator[HubServer]:
    """Yield a hub with these repositories; it is closed at the end of the context."""
    server = HubServer()
    for repo in repos:
        server.add(repo)
    server.start()
    try:
        yield server
    finally:
        server.close()


def sha256(data: bytes | Path) -> str:
    return hashlib.sha256(data if isinstance(data, bytes) else str(data).encode()).hexdigest()


def _size(data: bytes | Path) -> int:
    return len(data) if isinstance(data, bytes) else data.stat().st_size


def _piece(data: bytes | Path, first: int, end: int) -> bytes:
    if isinstance(data, bytes):
        return data[first:end]
    with data.open("rb") as file:
        file.seek(first)
        return file.read(end - first)


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 64
    hub: HubServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: tests break connections on purpose."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.0"

    def setup(self) -> None:
        super().setup()
        # What a killed reader had not read is then little.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE_BYTES)

    def log_message(self, format: str, *args: object) -> None:
        pass

    @property
    def hub(self) -> HubServer:
        return self.server.hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        bearer = self.headers.get("Authorization", "")
        token = bearer.removeprefix("Bearer ") or None
        self.hub.asked.append(Asked(self.path, self.headers.get("Range"), token))
        with suppress(ConnectionError, TimeoutError):
            if path == "/api/models":
                self._search(query)
            elif path.startswith("/api/models/"):
                self._api(path.removeprefix("/api/models/"), query, token)
            elif path.startswith("/cdn/"):
                self._link(path.removeprefix("/cdn/"))
            elif path.startswith("/plain/"):
                self._plain(path.removeprefix("/plain/"))
            else:
                self._resolve(path.strip("/"), token)

    # ------------------------------------------------------------------ what the hub says

    def _search(self, query: dict[str, list[str]]) -> None:
        if self._refused():
            return
        text = query.get("search", [""])[0].lower()
        found = [repo for repo in self.hub.repos.values() if text in repo.name.lower()]
        if query.get("sort", [""])[0] == "downloads":
            found.sort(key=lambda repo: -repo.downloads)
        limit = int(query.get("limit", ["100"])[0])
        self._json([_described(repo) for repo in found[:limit]])

    def _api(self, rest: str, query: dict[str, list[str]], token: str | None) -> None:
        if self._refused():
            return
        parts = rest.split("/")
        repo = self._repo("/".join(parts[:2]), token)
        if repo is None:
            return
        if parts[2:3] == ["tree"]:
            self._json([_entry(path, data) for path, data in repo.files.items()])
        elif parts[2:3] in ([], ["revision"]):
            if parts[3:] and parts[3] not in ("main", repo.commit):
                self._fail(HTTPStatus.NOT_FOUND, "RevisionNotFound")
                return
            self._json(_described(repo) | {"sha": repo.commit})
        else:
            self._fail(HTTPStatus.NOT_FOUND, "EntryNotFound")

    def _repo(self, name: str, token: str | None) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None:
            self._fail(HTTPStatus.UNAUTHORIZED, "RepoNotFound")
        elif token is not None and token != self.hub.token:
            self._fail(HTTPStatus.UNAUTHORIZED, "")
        else:
            return repo
        return None

    def _resolve(self, path: str, token: str | None) -> None:
        parts = path.split("/")
        name, file = "/".join(parts[:2]), "/".join(parts[4:])
        repo = self._repo(name, token)
        if repo is None:
            return
        if repo.gated and token != self.hub.token:
            self._fail(HTTPStatus.FORBIDDEN, "GatedRepo")
            return
        if file == "README.md":
            self._bytes(repo.card.encode(), "text/plain")
            return
        data = repo.files.get(file)
        if data is None:
            self._fail(HTTPStatus.NOT_FOUND, "EntryNotFound")
            return
        fault = self._next_fault("redirect", "busy", "broken")
        if fault is not None and fault.kind != "redirect":
            self._fault_status(fault)
            return
        self.send_response(HTTPStatus.FOUND)
        self.send_header("Location", fault.target if fault else f"/cdn/{name}/{file}?signature=1")
        self.send_header("X-Repo-Commit", repo.commit)
        self.send_header("X-Linked-Etag", f'"{sha256(data)}"')
        self.send_header("X-Linked-Size", str(_size(data)))
        # What the hub says to those who fetch files in pieces; for all others the link is enough.
        self.send_header("X-Xet-Hash", sha256(data))
        pieces = f"{self.hub.url}{XET_PATH}"
        self.send_header(
            "Link", f'<{pieces}/read-token>; rel="xet-auth", <{pieces}/{file}>; rel="xet-reconstruction-info"'
        )
        self.send_header("Content-Length", "0")
        self.end_headers()

    # ------------------------------------------------------------------ bytes

    def _link(self, path: str) -> None:
        owner, name, file = path.split("/", 2)
        self._serve(file, self.hub.repos[f"{owner}/{name}"].files[file], '"of-the-store"')

    def _plain(self, name: str) -> None:
        if name in self.hub.plain:
            self._serve(name, self.hub.plain[name], self.hub.plain_etag)
        else:
            self._fail(HTTPStatus.NOT_FOUND, "")

    def _serve(self, file: str, data: bytes | Path, etag: str | None) -> None:
        size = _size(data)
        fault = self._next_fault()
        if fault is not None and self._fault_status(fault):
            return
        kind = fault.kind if fault else None
        first, end = _span(self.headers.get("Range"), size)
        if kind == "web_page":
            self._bytes(b"<!doctype html><title>Sign in</title>", "text/html")
            return
        if first >= size > 0:
            self._fail(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "")
            return
        if self.headers.get("Range") is None or kind in ("no_ranges", "no_length"):
            first, end = 0, size
            self.send_response(HTTPStatus.OK)
        else:
            self.send_response(HTTPStatus.PARTIAL_CONTENT)
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{size}")
        stated = end - first + {"short": -10, "long": 10}.get(kind or "", 0)
        if kind != "no_length":
            self.send_header("Content-Length", str(stated))
        if etag is not None:
            self.send_header("ETag", etag)
        self.end_headers()
        if self.command != "HEAD":
            self._send(file, data, first, end, fault)

    def _send(self, file: str, data: bytes | Path, first: int, end: int, fault: Fault | None) -> None:
        at = first
        stop = end
        sent = SentRange(file, first, first)
        self.hub.sent.append(sent)
        if fault is not None and fault.kind in ("cut", "stall", "drip"):
            stop = min(end, first + fault.after_bytes)
        while at < stop and not self.hub.closing.is_set():
            if self.hub.at_bytes is not None:
                self.hub.at_bytes(at - first)
            piece = _piece(data, at, min(at + PIECE_BYTES, stop))
            if fault is not None and fault.kind == "corrupt" and at == first:
                piece = bytes([piece[0] ^ 1]) + piece[1:]
            at += len(piece)
            # Before the write, after which the client may end at once.
            sent.end = at
            self.wfile.write(piece)
        if fault is not None and fault.kind == "stall" and at < end:
            self._say_nothing()
        if fault is not None and fault.kind == "drip":
            self._drip(_piece(data, at, end))

    def _drip(self, data: bytes) -> None:
        for at in range(0, len(data), _DRIP_BYTES):
            if self.hub.closing.wait(_LOOK_S):
                return
            self.wfile.write(data[at : at + _DRIP_BYTES])

    def _say_nothing(self) -> None:
        """Keep the connection open without an answer until the client or the server closes it."""
        while not self.hub.closing.is_set() and not select.select([self.connection], [], [], _LOOK_S)[0]:
            pass

    # ------------------------------------------------------------------ faults

    def _next_fault(self, *kinds: FaultKind) -> Fault | None:
        """Remove and return the next fault if it is one of `kinds`; None otherwise.

        Without `kinds` any fault but a redirect counts.
        """
        faults = self.hub.faults
        if faults and (faults[0].kind in kinds if kinds else faults[0].kind != "redirect"):
            return faults.popleft()
        return None

    def _refused(self) -> bool:
        fault = self._next_fault("busy", "broken", "web_page")
        if fault is not None and fault.kind == "web_page":
            self._bytes(b"<!doctype html><title>Sign in</title>", "text/html")
            return True
        return fault is not None and self._fault_status(fault)

    def _fault_status(self, fault: Fault) -> bool:
        status = {
            "busy": HTTPStatus.TOO_MANY_REQUESTS,
            "broken": HTTPStatus.SERVICE_UNAVAILABLE,
            "expired": HTTPStatus.FORBIDDEN,
            "range_refused": HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
        }.get(fault.kind)
        if status is None:
            return False
        self._fail(status, "", wait_s=fault.wait_s)
        return True

    def _fail(self, status: HTTPStatus, code: str, *, wait_s: int | None = None) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if wait_s is not None:
            self.send_header("Retry-After", str(wait_s))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: object) -> None:
        change = self.hub.change
        self._bytes(change(value) if change else json.dumps(value).encode(), "application/json")

    def _bytes(self, data: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _span(value: str | None, size: int) -> tuple[int, int]:
    if value is None:
        return 0, size
    first, _, last = value.removeprefix("bytes=").partition("-")
    return int(first), min(size, int(last) + 1) if last else size


def _described(repo: Repo) -> dict[str, object]:
    return {
        "_id": "0", "id": repo.name, "modelId": repo.name, "downloads": repo.downloads, "likes": repo.likes,
        "gated": "manual" if repo.gated else False, "private": False, "tags": list(repo.tags),
        "pipeline_tag": "text-generation", "lastModified": "2026-11-01T12:00:00.000Z", "gguf": repo.gguf,
    }  # fmt: skip


def _entry(path: str, data: bytes | Path) -> dict[str, object]:
    digest, size = sha256(data), _size(data)
    return {
        "type": "file", "oid": digest[:40], "size": size, "path": path,
        "lfs": {"oid": digest, "size": size, "pointerSize": 134}, "xetHash": digest,
    }  # fmt: skip
