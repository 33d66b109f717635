"""HTTP requests to hubs and other servers: deadlines, proxies, redirects to https only, answers of bounded size.

The time-out of a usual HTTP client starts again with every byte, so a server that sends a byte now and then could keep
a request open without end. So this module is built on the standard library: each read has a deadline, and a minimum
rate is required. A token is sent to the requested server only, and not to a server that it redirects to.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any
from urllib.parse import urljoin, urlsplit

from msgspec import Struct

from engine.base.language import tr
from engine.base.texts import clean
from engine.library.hub.settings import HubError, is_loopback, is_safe_url, same_origin

# Seconds to connect, to receive the headers, and without any byte.
TIMEOUT_S = 30.0
# Minimum rate: less than this in `TIMEOUT_S` counts as no answer.
SLOWEST_BYTES_PER_S = 1024
# Minimum rate, beyond `TIMEOUT_S`, for short answers that a person waits for, such as a model card.
SHORT_BYTES_PER_S = 32 * 1024
USER_AGENT = "layerdeck"
# Longest pause that is kept automatically: servers may request hours.
MAX_WAIT_S = 120.0
_MAX_REDIRECTS = 8
_MAX_VALUE = 500
_REDIRECTS = (301, 302, 303, 307, 308)


class Paced(io.RawIOBase):
    """Raw stream of a socket with a deadline for its reads.

    Unlike a socket's time-out, the deadline is not extended when bytes arrive.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._raw = connection.makefile("rb", buffering=0)
        self.allow(connection.gettimeout() or TIMEOUT_S)

    def allow(self, seconds: float) -> None:
        """Set the deadline of the following reads to `seconds` from now."""
        self._deadline_s = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        # The time-out of a socket starts again with every byte, so it is set to what is left.
        self._connection.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class PacedResponse(http.client.HTTPResponse):
    """An HTTP response with a deadline for its headers and for each read."""

    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        # Replaces the file that HTTPResponse made of the socket, whose reads have no deadline.
        self.fp.close()
        self.paced = Paced(sock)
        self.fp = io.BufferedReader(self.paced)


class _Connection(http.client.HTTPConnection):
    response_class = PacedResponse


class _SafeConnection(http.client.HTTPSConnection):
    response_class = PacedResponse


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


class _SafeHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SafeConnection, req, context=_tls_context())


def make_opener() -> urllib.request.OpenerDirector:
    """Return an opener for http and https only. It follows no redirects, and raises no error for a status like 404."""
    # `build_opener` would add handlers for file:, ftp: and data: addresses, and redirects without our checks.
    opener = urllib.request.OpenerDirector()
    opener.add_handler(urllib.request.ProxyHandler())
    opener.add_handler(_Handler())
    opener.add_handler(_SafeHandler())
    opener.add_handler(urllib.request.UnknownHandler())
    return opener


@cache
def _tls_context() -> ssl.SSLContext:
    # Loading the certificates of the system takes a while; the context serves any number of connections.
    return ssl.create_default_context()


# Makes the error of an answer from its status, headers and address.
ErrorOfResponse = Callable[[int, Message, str], HubError]


class Head(Struct, frozen=True):
    """Size, etag, commit and byte range of a file, from the headers of an HTTP response.

    `url`: address of the response, after redirects.
    `etag`: etag of the file without quotation marks, None if not stated.
    `size_bytes`: size of the whole file, None if not stated.
    `commit`: commit of the file at the hub, None if not stated.
    `first`, `end`: byte range of the file that the response contains, `end` excluded; `end` is None if it is unknown.

    If the hub redirects to its storage, etag and size are those that the hub states.
    """

    url: str
    status: int
    etag: str | None
    size_bytes: int | None
    commit: str | None
    first: int
    end: int | None


class Response:
    """An open HTTP response with deadlines for its reads; a context manager that closes the connection."""

    def __init__(self, head: Head, stream: PacedResponse, timeout_s: float) -> None:
        self.head = head
        self._stream = stream
        self._timeout_s = timeout_s
        self._waited_s = 0.0
        self._came_bytes = 0

    def __enter__(self) -> Response:
        return self

    @property
    def headers(self) -> Message:
        """HTTP headers of this response, after all redirects."""
        return self._stream.headers

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def read_some(self, max_bytes: int) -> bytes:
        """Return the bytes that have arrived, at most `max_bytes`; empty at the end of the content.

        Raises:
            HubError: if the connection is lost, ends early, or is too slow.
        """
        begun_s = time.monotonic()
        self._stream.paced.allow(self._timeout_s)
        try:
            part = self._stream.read1(max_bytes)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise hub_error_of(error, self.head.url) from error
        self._note(len(part), time.monotonic() - begun_s)
        return part

    def read_up_to(self, max_bytes: int) -> bytes:
        """Return the content, at most `max_bytes` of it. The whole read has one deadline, so it is for short answers.

        Raises:
            HubError: if the connection is lost, ends early, or is too slow.
        """
        limit_s = time.monotonic() + self._timeout_s + max_bytes / SHORT_BYTES_PER_S
        parts: list[bytes] = []
        left = max_bytes
        while left > 0 and (part := self.read_some(min(left, 1 << 18))):
            parts.append(part)
            left -= len(part)
            if time.monotonic() > limit_s:
                raise hub_error_of(TimeoutError(), self.head.url)
        return b"".join(parts)

    def read_whole(self, max_bytes: int) -> bytes:
        """Return the whole content of a short answer.

        Raises:
            HubError: if the connection is lost, ends early, or is too slow, or if the content is longer than
                `max_bytes`.
        """
        data = self.read_up_to(max_bytes + 1)
        if len(data) > max_bytes:
            raise HubError(
                "answer",
                tr(
                    "{host} sent more than {max_bytes} bytes where a short answer was expected; check the address.",
                    host=_host(self.head.url),
                    max_bytes=max_bytes,
                ),
            )
        return data

    def _note(self, n_bytes: int, waited_s: float) -> None:
        """Count received bytes and the seconds waited for them. The time between two reads is not counted.

        Raises:
            HubError: if the rate since the last check is below `SLOWEST_BYTES_PER_S`.
        """
        self._came_bytes += n_bytes
        self._waited_s += waited_s
        if self._waited_s < self._timeout_s:
            return
        # No bytes are the end of an answer, and not a slow one.
        if n_bytes and self._came_bytes < self._waited_s * SLOWEST_BYTES_PER_S:
            raise hub_error_of(TimeoutError(), self.head.url)
        self._came_bytes, self._waited_s = 0, 0.0


def open_url(
    url: str,
    *,
    token: str | None = None,
    first: int | None = None,
    end: int | None = None,
    timeout_s: float = TIMEOUT_S,
    error_of_response: ErrorOfResponse | None = None,
) -> Response:
    """Send a GET request for `url`, follow redirects, and return the open response. Waits for the network.

    `token`: access token, sent to the host of `url` only.
    `first`, `end`: byte range to request, `end` excluded; None for the start and the end of the file.
    `timeout_s`: seconds to connect, to receive the headers, and for each read.
    `error_of_response`: makes the error for a status other than 200 and 206; None for `error_of_status`.

    Raises:
        HubError: for any status other than 200 and 206, and if the connection fails.
    """
    # Compressed answers have no byte ranges of the file, so none are accepted.
    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    if first is not None:
        # The last byte of a range is inclusive (RFC 9110, section 14.1.2).
        headers["Range"] = f"bytes={first}-{'' if end is None else end - 1}"
    at, linked = url, _Linked()
    for _ in range(_MAX_REDIRECTS):
        require_safe(at, url)
        # The token stays at its server: the hub redirects to signed links of its storage, which need none.
        sent = {**headers, "Authorization": f"Bearer {token}"} if token and same_origin(at, url) else headers
        stream = _ask(at, sent, timeout_s, error_of_response or error_of_status)
        linked = linked.with_response(stream)
        if stream.status not in _REDIRECTS:
            return Response(_head(at, stream, linked), stream, timeout_s)
        target = stream.headers.get("Location", "")
        stream.close()
        try:
            # `Location` may be relative.
            at = urljoin(at, target)
        except ValueError:
            at = target  # No valid address; `require_safe` refuses it.
    raise HubError("redirect", tr("{host} redirects in circles; try another address.", host=_host(url)))


def open_range(url: str, first: int, end: int, *, token: str | None = None, timeout_s: float = TIMEOUT_S) -> bytes:
    """Return the bytes of a remote file from the offset `first` up to `end`, or up to the end of a shorter file.

    Raises:
        HubError: if the connection fails, the server answers with an error, or it ignores range requests.
    """
    with open_url(url, token=token, first=first, end=end, timeout_s=timeout_s) as response:
        # A server without ranges answers 200 and starts at byte 0.
        if response.head.first != first:
            raise HubError(
                "answer",
                tr(
                    "{host} cannot send parts of a file, so the header of the model cannot be read. Download the "
                    "whole file.",
                    host=_host(url),
                ),
            )
        return response.read_up_to(end - first)


class _Linked(Struct, frozen=True):
    """Etag, size and commit of a file, from the headers of the response that redirects to the hub's storage."""

    etag: str | None = None
    size_bytes: int | None = None
    commit: str | None = None

    def with_response(self, stream: http.client.HTTPResponse) -> _Linked:
        headers = stream.headers
        return _Linked(
            self.etag or plain_etag(headers.get("X-Linked-Etag")),
            self.size_bytes if self.size_bytes is not None else _number(headers.get("X-Linked-Size")),
            self.commit or _bounded(headers.get("X-Repo-Commit")),
        )


def plain_etag(value: str | None) -> str | None:
    """Return an etag without quotation marks and without the prefix `W/` of a weak etag; None if there is none."""
    bounded = _bounded(value)
    return bounded.removeprefix("W/").strip('"') or None if bounded else None


def _head(url: str, stream: http.client.HTTPResponse, linked: _Linked) -> Head:
    headers = stream.headers
    length = _number(headers.get("Content-Length"))
    first, end, total = 0, length, length
    if stream.status == http.HTTPStatus.PARTIAL_CONTENT:
        first, end, total = _content_range(headers.get("Content-Range"), url)
    return Head(
        url=url,
        status=stream.status,
        etag=linked.etag or plain_etag(headers.get("ETag")) or _bounded(headers.get("Last-Modified")),
        # The length of this response comes first: the page of a proxy then differs in size from the file.
        size_bytes=total if total is not None else linked.size_bytes,
        commit=linked.commit,
        first=first,
        end=end,
    )


def _content_range(value: str | None, url: str) -> tuple[int, int | None, int | None]:
    unit, _, rest = (value or "").partition(" ")
    span, _, total = rest.partition("/")
    first, _, last = span.partition("-")
    start, stop = _number(first), _number(last)
    if unit != "bytes" or start is None or stop is None or stop < start:
        raise HubError(
            "answer",
            tr(
                "{host} sent part of the file without its position (Content-Range); try again, or use another mirror.",
                host=_host(url),
            ),
        )
    # Content-Range states the last byte (RFC 9110, section 14.4), and `end` is the offset after it.
    return start, stop + 1, _number(total)


def _open(request: urllib.request.Request, timeout_s: float) -> PacedResponse:
    try:
        stream = make_opener().open(request, timeout=timeout_s)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise hub_error_of(error, request.full_url) from error
    assert isinstance(stream, PacedResponse)
    return stream


def _ask(url: str, headers: dict[str, str], timeout_s: float, error_of_response: ErrorOfResponse) -> PacedResponse:
    stream = _open(urllib.request.Request(url, headers=headers), timeout_s)
    if stream.status in (200, 206) or stream.status in _REDIRECTS:
        return stream
    with stream:
        raise error_of_response(stream.status, stream.headers, url)


def require_safe(url: str, asked: str) -> None:
    """Refuse `url` if it is not https, or if a server elsewhere redirected to an address of this computer.

    Http is accepted if both `url` and `asked` are addresses of this computer.

    `asked`: address of the original request, whose server may have redirected to `url`.

    Raises:
        HubError: if the address is refused.
    """
    # A server elsewhere must not send us to what listens on this machine.
    if not is_safe_url(url) or (is_loopback(url) and not is_loopback(asked)):
        raise HubError(
            "redirect",
            tr(
                "{host} redirects to {target}, which is not an https address. Nothing was downloaded.",
                host=_host(asked),
                target=clean(url),
            ),
        )


def error_of_status(status: int, headers: Message, url: str) -> HubError:
    """Return the error for the status code and headers of an HTTP response from `url`."""
    host = _host(url)
    code = headers.get("X-Error-Code") or ""
    if code == "GatedRepo" or (status == 403 and "gated" in (headers.get("X-Error-Message") or "").lower()):
        return HubError(
            "gated", tr(
                "This model is gated on {host}. Sign in on the page of the model and accept the terms, then enter an "
                "access token of your account.", host=host),
        )  # fmt: skip
    if status == 401:
        return HubError(
            "token",
            tr(
                "{host} needs an access token for this file, or rejected the token that was sent. Check the "
                "access token.",
                host=host,
            ),
        )
    if status == 403:
        return HubError(
            "refused",
            tr(
                "{host} refused this file (HTTP status 403). The link may have expired; search for the file again.",
                host=host,
            ),
        )
    if status in (404, 410):
        return HubError("not_found", tr("{host} does not have this file; search for the file again.", host=host))
    if status == 407:
        return HubError("proxy", tr("The proxy needs a user name and a password; add both to the proxy's address."))
    if status == 416:
        return HubError(
            "answer",
            tr(
                "{host} does not have the requested part of the file (HTTP status 416). The file may have changed; "
                "search for the file again.",
                host=host,
            ),
        )
    if status == 429:
        return HubError(
            "rate_limited",
            tr(
                "{host} limits the number of requests (HTTP status 429). Try again later, or enter an access token.",
                host=host,
            ),
            retry_after_s=retry_after(headers),
        )  # fmt: skip
    if status >= 500:
        return HubError(
            "server",
            tr("{host} reports a server error (status {status}); try again later.", host=host, status=status),
            retry_after_s=retry_after(headers),
        )
    return HubError(
        "answer", tr("{host} sent HTTP status {status} instead of the file; try again later.", host=host, status=status)
    )


def retry_after(headers: Message) -> float | None:
    """Return the pause in seconds that the header `Retry-After` requests, at most `MAX_WAIT_S`.

    None if the server requests no pause.
    """
    value = headers.get("Retry-After")
    if not value:
        return None
    seconds = _number(value.strip())
    if seconds is None:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return None
        from datetime import datetime

        seconds = round((date - datetime.now(date.tzinfo)).total_seconds())
    return min(max(0.0, float(seconds)), MAX_WAIT_S)


def hub_error_of(error: BaseException, url: str) -> HubError:
    """Return the `HubError` for an exception that a connection to the host of `url` raised."""
    if isinstance(error, HubError):
        return error
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    host = _host(url)
    if isinstance(cause, ssl.SSLError):
        reason = getattr(cause, "verify_message", "") or cause.reason or "TLS"
        return HubError(
            "tls", tr("The connection to {host} is not secure ({reason}); check this computer's clock, proxy and "
                "certificates.", host=host, reason=clean(str(reason))),
        )  # fmt: skip
    if isinstance(cause, TimeoutError):
        return HubError("timeout", tr("{host} does not answer; check the network, or try again later.", host=host))
    text = clean(str(cause))
    # The standard library has no types of exceptions for these two.
    if "Tunnel connection failed" in text or "unknown url type" in text:
        return HubError(
            "proxy",
            tr(
                "The proxy did not connect to {host} ({reason}); check the address of the proxy.",
                host=host,
                reason=text,
            ),
        )
    if isinstance(cause, http.client.HTTPException | ConnectionError):
        return HubError(
            "unreachable",
            tr(
                "The connection to {host} was lost ({reason}). Try again.",
                host=host,
                reason=text or type(cause).__name__,
            ),
        )
    return HubError(
        "unreachable", tr("{host} cannot be reached ({reason}); check the network.", host=host, reason=text)
    )


def _host(url: str) -> str:
    try:
        return clean(urlsplit(url).netloc.rpartition("@")[2]) or tr("The server")
    except ValueError:
        return tr("The server")


def _number(value: str | None) -> int | None:
    # 18 digits are below 2**63.
    return int(value) if value and len(value) <= 18 and value.isascii() and value.isdigit() else None


def _bounded(value: str | None) -> str | None:
    return value if value and len(value) <= _MAX_VALUE and value.isprintable() else None
