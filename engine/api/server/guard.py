"""Checks every request before a handler gets it: `Host` and `Origin` headers, API key, size.

The header checks refuse requests from web pages of other sites. A page in a browser on this computer can send requests
to the server, but cannot forge its `Origin` header. If the page's owner points a domain name to this computer's address
(DNS rebinding), that name is in the `Host` header.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from engine.api.wire.errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PUBLIC = frozenset({"/health"})
"""Paths that need no API key, so that monitors can check whether the server runs."""
LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost", "ip6-loopback"})
_CORS_HEADERS = re.compile(
    r"(?:authorization|content-type|accept|accept-language|user-agent|x-api-key|x-request-id|idempotency-key"
    r"|x-stainless-[a-z-]{1,40}|anthropic-[a-z-]{1,40}|openai-[a-z-]{1,40})"
)
"""Request headers that web pages may send (CORS): those of OpenAI's and Anthropic's JavaScript clients."""
_CLOSING = frozenset({401, 403, 408, 413, 415, 431})
"""Error statuses after which the connection is closed: the client has no access, or the request's body was not read."""
MAX_HEADERS = 100
MAX_BODIES = 4
"""Limit for the bytes of all request bodies in memory together, as a multiple of `Access.max_body_bytes`."""
BODY_SECONDS = 30.0
"""Longest pause in seconds between two parts of a body."""


class Access(Struct, frozen=True):
    """The rules of the API server for requests: who may send them, and how large they may be.

    `keys`: SHA-256 of each API key; empty: no key is needed.
    `hosts`: host names that are allowed in addition to IP addresses and names of the loopback interface; lower case.
    `origins`: origins of web pages that may send requests, such as `http://localhost:3000`.
    `max_body_bytes`: largest body of a request.
    `body_seconds`: longest pause between two parts of a body.
    `is_loopback`: whether only this computer can reach the server.
    """

    keys: tuple[bytes, ...] = ()
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    max_body_bytes: int = 64 << 20
    body_seconds: float = BODY_SECONDS
    is_loopback: bool = True

    def knows_key(self, key: str) -> bool:
        """Return whether `key` is an API key. The time that this takes does not reveal which key matches."""
        digest = key_digest(key)
        found = False
        for each in self.keys:
            found |= hmac.compare_digest(each, digest)
        return found

    def knows_host(self, header: str) -> bool:
        """Return whether a `Host` header names this server: by an IP address, a loopback name, or an allowed name.

        DNS rebinding needs a domain name, so an IP address in the header is safe. If only this computer can reach the
        server, the address must be one of the loopback interface.
        """
        name = _host_name(header)
        if name in LOOPBACK_NAMES or name in self.hosts:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self.is_loopback


def key_digest(key: str) -> bytes:
    """Return the SHA-256 of an API key.

    All digests have the same length, so comparing them does not reveal the length of a key.
    """
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _host_name(header: str) -> str:
    try:
        return (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return ""


class Guard:
    """The outermost ASGI application: it refuses requests that `Access` does not allow, and limits the size of request
    bodies.
    """

    def __init__(self, app: App, access: Access, refused: Callable[[Scope, ApiError], None] | None = None) -> None:
        """Guard `app`. `refused`: called with each request that the guard refuses, before the request is answered."""
        self._app, self._access, self._refused = app, access, refused
        self._bodies = _Bodies(access.max_body_bytes * MAX_BODIES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the inner application, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = _Headers(scope["headers"])
        origin = headers.one("origin")
        try:
            self._check_names(headers, origin)
            if scope["method"] == "OPTIONS" and origin:
                await _respond(send, 204, b"", self._preflight(headers, origin))
                return
            self._check_key(scope, headers)
            # Whoever asks a public path has shown no key.
            if scope["path"] not in PUBLIC:
                scope.get("layerdeck.trust", lambda: None)()
            self._check_body(headers)
        except ApiError as error:
            if self._refused is not None:
                self._refused(scope, error)
            await respond_with_error(send, error, scope["path"], cors=self._cors(origin))
            return
        cors = self._cors(origin)

        async def send_with_origin(message: Message) -> None:
            if cors and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_encoded(cors)]}
            await send(message)

        limited = _Body(receive, self._access, self._bodies)
        try:
            await self._app(scope, limited, send_with_origin)
        finally:
            limited.release()

    def _check_names(self, headers: _Headers, origin: str) -> None:
        if len(headers) > MAX_HEADERS:
            raise ApiError(431, f"The request has more than {MAX_HEADERS} headers.", code="too_many_headers")
        if headers.count("host") != 1 or not self._access.knows_host(headers.one("host")):
            raise ApiError(
                403,
                "This server does not accept this host name. Use its address, or start it with --allow-host NAME.",
                code="host_not_allowed",
            )
        if headers.count("origin") > 1 or (origin and origin not in self._access.origins):
            raise ApiError(
                403,
                "Web pages of this origin may not use this server; allow the origin with --allow-origin ORIGIN.",
                code="origin_not_allowed",
            )

    def _check_key(self, scope: Scope, headers: _Headers) -> None:
        if not self._access.keys or scope["path"] in PUBLIC:
            return
        scheme, _, token = headers.one("authorization").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.one("x-api-key")
        if not self._access.knows_key(key):
            raise ApiError(
                401,
                "The API key is missing or wrong; send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_body(self, headers: _Headers) -> None:
        if headers.one("content-encoding") not in ("", "identity"):
            raise ApiError(415, "Compressed bodies are not accepted; send plain JSON.", code="content_encoding")
        length = headers.one("content-length")
        if length.isascii() and length.isdigit() and int(length) > self._access.max_body_bytes:
            raise _too_large(self._access.max_body_bytes)

    def _cors(self, origin: str) -> dict[str, str]:
        if not origin or origin not in self._access.origins:
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "retry-after",
            "Vary": "Origin",
        }

    def _preflight(self, headers: _Headers, origin: str) -> dict[str, str]:
        asked = (name.strip().lower() for name in headers.one("access-control-request-headers").split(","))
        allowed = (name for name in asked if _CORS_HEADERS.fullmatch(name))
        answer = {
            **self._cors(origin),
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": ", ".join(dict.fromkeys(allowed)) or "authorization, content-type",
            "Access-Control-Max-Age": "600",
        }
        if headers.one("access-control-request-private-network") == "true":
            # Chrome asks it before a public page may reach an address of this computer or network.
            answer["Access-Control-Allow-Private-Network"] = "true"
        return answer


class _Bodies(Struct):
    """The budget for request bodies in memory: number of bytes that all requests together may still read."""

    left_bytes: int


class _Body:
    """The ASGI `receive` of one request, which refuses a body that is too large or too slow.

    Call `release` when the request ends.
    """

    def __init__(self, receive: Receive, access: Access, bodies: _Bodies) -> None:
        self._receive, self._access, self._bodies = receive, access, bodies
        self._taken_bytes = 0
        # Counted as it comes too: a body in chunks has no length in its headers.
        self._left_bytes = access.max_body_bytes
        self._is_whole = False

    async def __call__(self) -> Message:
        if self._is_whole:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), self._access.body_seconds)
        except TimeoutError:
            raise ApiError(408, "The body of the request did not arrive in time.", code="body_timeout") from None
        if message["type"] == "http.request":
            size_bytes = len(message.get("body", b""))
            self._left_bytes -= size_bytes
            if self._left_bytes < 0:
                raise _too_large(self._access.max_body_bytes)
            self._taken_bytes += size_bytes
            self._bodies.left_bytes -= size_bytes
            if self._bodies.left_bytes < 0:
                raise ApiError(
                    503,
                    "Too many large requests at a time; send this one again later.",
                    code="bodies_full",
                    headers={"Retry-After": "5", "Connection": "close"},
                )
            self._is_whole = not message.get("more_body", False)
        return message

    def release(self) -> None:
        """Give the bytes of this body back to the budget that all requests share."""
        self._bodies.left_bytes += self._taken_bytes
        self._taken_bytes = 0


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"The body is larger than {most_bytes >> 20} MiB.", code="body_too_large")


class _Headers:
    """The headers of a request by name. Bytes that are not ASCII are decoded as Latin-1."""

    def __init__(self, pairs: list[tuple[bytes, bytes]]) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def count(self, name: str) -> int:
        """Return how many headers have this name."""
        return sum(key == name.encode() for key, _ in self._pairs)

    def one(self, name: str) -> str:
        """Return the value of the first header with this name; empty if there is none."""
        return next((value.decode("latin-1").strip() for key, value in self._pairs if key == name.encode()), "")


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]


async def _respond(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": _encoded(headers)})
    await send({"type": "http.response.body", "body": body})


async def respond_with_error(send: Send, error: ApiError, path: str, *, cors: dict[str, str] | None = None) -> None:
    """Answer with a JSON error: in Anthropic's form below `/v1/messages`, else in OpenAI's.

    The rest of the request's body is not read.

    `cors`: CORS headers, which allow a web page to read the answer; None: no CORS headers.
    """
    is_anthropic = path.startswith("/v1/messages")
    body = msgspec.json.encode(error.anthropic_document() if is_anthropic else error.document())
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers, **(cors or {})}
    if error.status in _CLOSING:
        headers["Connection"] = "close"
    if error.status in (408, 413, 431):
        headers["Connection"] = "close"
    await _respond(send, error.status, body, headers)
