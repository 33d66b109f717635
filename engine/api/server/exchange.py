"""One HTTP request and its answer, and the ASGI application that runs a handler for each request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from engine.api.server.asking import TooSlowError
from engine.api.server.guard import Message, Receive, Scope, Send, respond_with_error
from engine.api.server.journal import Journal, Record
from engine.api.wire.answer import PING
from engine.api.wire.errors import ApiError
from engine.base.errors import EngineError
from engine.base.texts import escape

_log = logging.getLogger("layerdeck.server")

SEND_SECONDS = 60.0
"""Seconds after which the connection is closed if the client has read no data."""
PING_S = 15.0
"""Seconds without data after which a stream gets a comment, so that clients and proxies keep the connection open."""
GONE = 499
"""Status in the journal of requests if the client closed the connection, as in nginx. It is never sent."""


class Exchange:
    """One HTTP request with its answer: the argument of each endpoint's handler. Used in the event loop only.

    A handler answers with one `respond`, or with `begin_stream`, several `send` and `end_stream`.
    `body`: the whole body of the request.
    `record`: updates the request's entry in the journal of requests.
    `on_fail`: returns the last bytes of a stream that fails after its first byte; None until `keep_open` is called.
    """

    def __init__(self, scope: Scope, send: Send, body: bytes, record: Record) -> None:
        self.scope, self.body, self.record = scope, body, record
        self.on_fail: Callable[[ApiError], bytes] | None = None
        self._send_raw = send
        self._loop = asyncio.get_running_loop()
        self._sending_since_s: float | None = None
        self._sent_s = 0.0
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._ping: asyncio.Task[None] | None = None
        self.has_begun = self.has_ended = False

    @property
    def path_name(self) -> str:
        """The path parameter `name`, such as the model id in `/v1/models/{name}`; empty if the route has none."""
        return str(self.scope["path_params"].get("name", ""))

    async def respond(self, document: object, status: int = 200) -> None:
        """Send a JSON document as the whole answer."""
        await self.respond_raw(msgspec.json.encode(document), "application/json", status)

    async def respond_raw(self, body: bytes, media_type: str, status: int = 200) -> None:
        """Send a body of any media type as the whole answer."""
        self.has_begun = self.has_ended = True
        headers = [(b"content-type", media_type.encode()), (b"content-length", str(len(body)).encode())]
        await self._send_soon({"type": "http.response.start", "status": status, "headers": headers})
        await self._send_soon({"type": "http.response.body", "body": body})
        self.record.end(status)

    def keep_open(self, on_fail: Callable[[ApiError], bytes]) -> None:
        """From now on send an SSE comment whenever nothing was sent for `PING_S` seconds.

        The first comment also sends the headers of the response, so later errors are sent in the stream.

        `on_fail`: returns the last bytes of the stream if it fails.
        """
        is_open = self.on_fail is not None
        self.on_fail = on_fail
        if not is_open:
            self._sent_s = self._loop.time()
            self._call_later(PING_S, self._ping_if_silent)

    def _ping_if_silent(self) -> None:
        silent_s = self._loop.time() - self._sent_s
        if silent_s >= PING_S and self._sending_since_s is None and not self.has_ended:
            self._ping = self._loop.create_task(self._send_ping())
            silent_s = 0.0
        # While `send` waits for the client, the silence may exceed PING_S: the next look is then after a whole PING_S.
        self._call_later(max(0.0, PING_S - silent_s) or PING_S, self._ping_if_silent)

    async def _send_ping(self) -> None:
        if self.has_ended:
            return  # The answer ended before this task began.
        with suppress(GoneError):  # `receive` tells of it too
            await self._begin()
            await self.send(PING)

    async def begin_stream(self) -> None:
        """Begin a stream of server-sent events, unless a keep-alive comment (`keep_open`) has already begun it."""
        # A comment may be under way: two tasks must not send at the same time.
        if self._ping is not None:
            await self._ping
        await self._begin()

    async def _begin(self) -> None:
        if self.has_begun:
            return
        self.has_begun = True
        headers = [
            (b"content-type", b"text/event-stream"),
            (b"cache-control", b"no-cache"),
            # Has nginx pass events on as they come.
            (b"x-accel-buffering", b"no"),
        ]
        self._call_later(SEND_SECONDS, self._watch_client)
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def _watch_client(self) -> None:
        """Close the connection of a stream if the client has read nothing for `SEND_SECONDS`.

        One timer serves the whole stream, instead of one for each part.
        """
        since_s, now_s = self._sending_since_s, self._loop.time()
        if since_s is not None and now_s - since_s >= SEND_SECONDS:
            break_off(self.scope)
        else:
            self._call_later(SEND_SECONDS, self._watch_client)

    def _call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers[call] = self._loop.call_later(seconds, call)

    def close(self) -> None:
        """Cancel the timers and the task that send comments and watch the client."""
        for timer in self._timers.values():
            timer.cancel()
        if self._ping is not None:
            self._ping.cancel()

    async def send(self, data: bytes) -> None:
        """Send a part of the stream.

        If the client reads nothing, this waits until the client reads again or `_watch_client` closes the connection.
        """
        if data:
            self._sent_s = self._sending_since_s = self._loop.time()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._sending_since_s = None

    async def end_stream(self, data: bytes, code: str = "") -> None:
        """Send the last part of the stream. `code`: error code for the journal of requests; empty if the answer is
        complete.
        """
        self.has_ended = True
        await self._send_soon({"type": "http.response.body", "body": data})
        self.record.end(200, code)

    async def fail(self, error: ApiError) -> None:
        """Answer with an error. If a stream has begun, end it with the error instead."""
        if not self.has_begun:
            self.has_begun = self.has_ended = True
            await respond_with_error(self._send, error, self.scope["path"])
            self.record.end(error.status, error.code or error.type)
        elif self.on_fail is not None and not self.has_ended:
            await self.begin_stream()
            await self.end_stream(self.on_fail(error), error.code or error.type)
        else:
            self.record.end(error.status, error.code or error.type)

    async def _send_soon(self, message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._send(message)
        except TimeoutError:
            raise GoneError from None

    async def _send(self, message: Message) -> None:
        # An `OSError` of anything else is a bug, or a disk that is full; only here it means the client.
        try:
            await self._send_raw(message)
        except OSError:
            raise GoneError from None


class GoneError(Exception):
    """Error: the client has closed the connection, or reads nothing."""


Handler = Callable[[Exchange], Awaitable[None]]


class Endpoint:
    """An ASGI application that runs one handler for each request.

    It reads the body, cancels the handler if the client disconnects, and turns exceptions into error answers.
    """

    def __init__(self, journal: Journal, handler: Handler) -> None:
        self._journal, self._handler = journal, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request."""
        client = scope.get("client")
        record = self._journal.begin(client[0] if client else "", scope["path"])
        exchange = Exchange(scope, send, b"", record)
        try:
            exchange.body = await _body(receive)
            if self._journal.keeps_texts:
                record.note_asked(exchange.body)
            await self._while_connected(exchange, receive)
        except ApiError as error:
            await _fail(exchange, error)
        except EngineError as error:
            await _fail(exchange, ApiError(503, error.summary(), code=error.kind))
        except (GoneError, TooSlowError):
            _end_gone(exchange)
        # Only the end of the server cancels this task: a client that disconnects raises `GoneError`.
        except asyncio.CancelledError:
            record.end(GONE, "ending")
            raise
        except Exception:
            _log.exception("a request to %s failed", escape(scope["path"]))
            await _fail(exchange, ApiError(500, "A bug in Layerdeck; the log says more.", code="internal"))
        finally:
            exchange.close()

    async def _while_connected(self, exchange: Exchange, receive: Receive) -> None:
        """Run the handler; cancel it and raise `GoneError` if the client disconnects."""
        # uvicorn tells of a lost client only to who waits in `receive`.
        work = asyncio.ensure_future(self._handler(exchange))
        disconnected = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((work, disconnected), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise GoneError
            await work
        finally:
            for task in (work, disconnected):
                task.cancel()
            await asyncio.gather(work, disconnected, return_exceptions=True)


async def _fail(exchange: Exchange, error: ApiError) -> None:
    try:
        await exchange.fail(error)
    except GoneError:
        _end_gone(exchange)


def _end_gone(exchange: Exchange) -> None:
    exchange.record.end(GONE, "client_gone")
    # An answer that is not whole must not look so: the connection ends without the last chunk.
    break_off(exchange.scope)


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise GoneError
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def break_off(scope: Scope) -> None:
    """Abort the connection and discard unsent data, so that the client notices that the answer is incomplete."""
    transport: asyncio.Transport | None = scope.get("layerdeck.transport")
    if transport is not None:
        transport.abort()
