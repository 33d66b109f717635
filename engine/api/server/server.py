"""The API server: a thread with its own event loop, in the process of the window or of `layerdeck-cli`."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from msgspec import Struct
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.api.server.app import Api
from engine.api.server.exchange import SEND_SECONDS
from engine.api.server.guard import Access, Receive, Scope, Send
from engine.api.server.journal import Journal
from engine.api.server.pool import ModelPool
from engine.api.wire.names import ModelEntry
from engine.base.errors import ArgumentError
from engine.planning.fit.loaded_models import HeldModel
from engine.runtime.session.session import ModelSession

_log = logging.getLogger("layerdeck.server")

MAX_CONNECTIONS = 256
MAX_HEADER_BYTES = 32 << 10
HEADER_SECONDS = 15.0
"""Longest time in seconds in which the head of a request must arrive."""
KEEP_ALIVE_SECONDS = 30
STOP_SECONDS = 15.0
"""Longest wait in seconds for models and the server's thread to end; a session takes some seconds at most."""


class Address(Struct, frozen=True):
    """The address on which the server listens.

    `certificate`, `private_key`: paths of PEM files for TLS; empty: no TLS.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    certificate: str = ""
    private_key: str = ""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.certificate else ''}://{host}:{self.port}"


class ApiServer:
    """The API server in its own thread. It is created stopped; call `start` and `stop` once each, from one thread.

    `address`: after `start` it has the port that the system chose for port 0.
    `on_end`: called in the server's thread when the server has ended, also after a failure.
    """

    def __init__(
        self,
        address: Address,
        access: Access,
        pool: ModelPool,
        *,
        version: str,
        journal: Journal,
        on_end: Callable[[], object] | None = None,
    ) -> None:
        self.address, self.pool, self.journal = address, pool, journal
        self._on_end = on_end
        self._api = Api(pool, journal, access, version)
        self._api.on_start = self._on_start
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = threading.Event()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen on the address, and serve in a new thread. Return when the server has started.

        Raises:
            ArgumentError: the server cannot listen on the address, or the certificate cannot be used.
        """
        listening = _listen(self.address)
        self.address = Address(
            self.address.host, listening.getsockname()[1], self.address.certificate, self.address.private_key
        )
        config = uvicorn.Config(
            self._api.application(),
            http=_Protocol,
            ws="none",
            loop="asyncio",
            lifespan="on",
            # uvicorn's own lines would name paths, and go where it likes; the journal has what is to be known.
            log_config=None,
            log_level=logging.CRITICAL,
            access_log=False,
            server_header=False,
            date_header=False,
            # Without a proxy that we know of, anybody could write another client's address into a header.
            proxy_headers=False,
            # One more: a connection too many is closed before uvicorn counts it.
            limit_concurrency=MAX_CONNECTIONS + 2,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
            ssl_certfile=self.address.certificate or None,
            ssl_keyfile=self.address.private_key or None,
        )
        try:
            config.load()
        except OSError as error:
            listening.close()
            raise ArgumentError(f"The certificate or its key cannot be used: {error.strerror or error}.") from None
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, args=(listening,), name="api-server", daemon=True)
        self._thread.start()
        self._begun.wait()

    def stop(self) -> None:
        """Unload all models that the server has loaded (in `pool`), then end the server; wait a bounded time.

        A second call only waits.
        """
        if self._server is not None and not self._server.should_exit:
            if self._loop is not None and self.is_running:
                # Models first: answers under way and requests that wait get an ending that is sent.
                with suppress(TimeoutError, RuntimeError):
                    asyncio.run_coroutine_threadsafe(self.pool.close(), self._loop).result(STOP_SECONDS)
            self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)

    def preload(self, entry: ModelEntry) -> Future[None]:
        """Begin to load a model before the first request for it.

        The future's result raises `ApiError` if the load fails.
        """
        return asyncio.run_coroutine_threadsafe(self.pool.preload(entry), self.loop)

    def lend(self, entry: ModelEntry, session: ModelSession, held: HeldModel) -> None:
        """Answer requests with a model that the caller has loaded. Only the caller unloads this model. Thread-safe.

        `held`: the memory that the model holds.
        """
        self.loop.call_soon_threadsafe(self.pool.lend, entry, session, held)

    def take_back(self, id: str) -> None:
        """Undo `lend`: no new request uses the caller's session. Thread-safe."""
        self.loop.call_soon_threadsafe(self.pool.take_back, id)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the running server. Other threads must call the methods of `pool` in this loop."""
        assert self._loop is not None
        return self._loop

    @property
    def is_running(self) -> bool:
        """Whether the server's thread is running."""
        return self._thread is not None and self._thread.is_alive()

    def _on_start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begun.set()

    def _run(self, listening: socket.socket) -> None:
        assert self._server is not None
        try:
            asyncio.run(self._serve(self._server, listening))
        except Exception:
            _log.exception("the server failed")
        finally:
            listening.close()
            # After a failure too: `start` waits for it without a time limit.
            self._begun.set()
            if self._on_end is not None:
                self._on_end()

    @staticmethod
    async def _serve(server: uvicorn.Server, listening: socket.socket) -> None:
        try:
            await server.serve(sockets=[listening])
        finally:
            # uvicorn closes connections regularly: one whose client reads nothing would outlive the event loop.
            for each in tuple(server.server_state.connections):
                each.transport.abort()
            # `abort` only schedules `connection_lost`, which runs in the next iteration of the loop.
            await asyncio.sleep(0)


class _Protocol(H11Protocol):
    """uvicorn's HTTP/1 protocol of one connection, with time limits for clients that have no key or read too slowly.

    `is_trusted`: whether `Guard` has accepted a request of this connection. Requests to public paths, which need no
    key, do not count.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        app = self.app
        self.is_trusted = False
        self._header_timer: asyncio.TimerHandle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None

        async def with_connection(scope: Scope, receive: Receive, send: Send) -> None:
            # ASGI can neither abort a connection nor mark it as trusted, so the application gets both by the scope.
            scope["layerdeck.transport"] = transport
            scope["layerdeck.trust"] = self._trust
            await app(scope, receive, send)

        self.app = with_connection
        self._opened_s = self.loop.time()
        self._watch_header()
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_place()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._flush_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_header()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A further request may have come in part; without a byte of it uvicorn's timer for idle connections runs.
        if self.conn.trailing_data[0]:
            self._watch_header()
        if self._flush_timer is None and self._unsent_bytes:
            self._flush_timer = self.loop.call_later(SEND_SECONDS, self._check_flushed, self._unsent_bytes)

    def _trust(self) -> None:
        self.is_trusted = True

    def _make_place(self) -> None:
        """Close the oldest connection without a valid key, so that clients without a key cannot keep others out."""
        # `abort` takes effect in the next iteration of the loop, and one iteration may accept many connections.
        open_ones = [each for each in self.connections if not each.transport.is_closing()]
        strangers = [each for each in open_ones if isinstance(each, _Protocol) and not each.is_trusted]
        min(strangers, key=lambda each: each._opened_s, default=self).transport.abort()

    def _watch_header(self) -> None:
        """Start or cancel the timer that closes the connection if the head of a request does not arrive in time.

        The timer runs while the connection waits for the head of a request.
        """
        is_due = self.conn.their_state in (h11.IDLE, h11.ERROR)
        if not is_due and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        elif is_due and self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    @property
    def _unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size()

    def _check_flushed(self, before_bytes: int) -> None:
        """Close the connection if the client has read nothing since the last check.

        A timer calls this as long as the last bytes of an answer are unsent. The handler of the request has already
        returned, so nothing else notices a client that does not read.

        `before_bytes`: number of unsent bytes at the last check.
        """
        unsent_bytes, self._flush_timer = self._unsent_bytes, None
        if unsent_bytes and unsent_bytes >= before_bytes and (self.cycle is None or self.cycle.response_complete):
            self.transport.abort()
        # Fewer bytes than before, or another answer: the client still reads.
        elif unsent_bytes:
            self._flush_timer = self.loop.call_later(SEND_SECONDS, self._check_flushed, unsent_bytes)


def _listen(address: Address) -> socket.socket:
    """Return a socket that is bound to the address and listens.

    uvicorn could create the socket, but a failure would then be a log line in the server's thread. Here it raises
    `ArgumentError`.
    """
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, bound_to = found[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ArgumentError(f"--host {address.host}: {getattr(error, 'strerror', None) or error}.") from None
    try:
        if sys.platform == "win32":
            # There `SO_REUSEADDR` lets several programs listen on one port.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            # Connections of a server that has just ended (TIME_WAIT) would block the port otherwise.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(bound_to)
        # uvicorn listens a moment after it has started; who connects until then waits.
        listening.listen(MAX_CONNECTIONS)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise ArgumentError(f"Cannot listen on {address.host}:{address.port}: {_why(error)}") from None
    return listening


def _why(error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return "another program uses this port. Choose another one with --port."
        case errno.EACCES:
            return "ports below 1024 need rights that this program does not have. Choose another one with --port."
        case errno.EADDRNOTAVAIL:
            return "this computer does not have this address."
    return f"{error.strerror or error}."
