"""HTTP connections on which no wait has no end: an answer that comes a byte now and then is in time for any timeout."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
import urllib.request
from functools import cache
from typing import Any

TIMEOUT_S = 30.0
"""For a connection, for all that comes before the bytes, and for a line that says nothing."""


class Paced(io.RawIOBase):
    """What a connection brings until a deadline."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._raw = connection.makefile("rb", buffering=0)
        self.allow(connection.gettimeout() or TIMEOUT_S)

    def allow(self, seconds: float) -> None:
        """Give it so long from now on."""
        self._deadline_s = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class PacedAnswer(http.client.HTTPResponse):
    """An answer whose head, and each step of whose reading, has a deadline."""

    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp.close()
        self.paced = Paced(sock)
        self.fp = io.BufferedReader(self.paced)


class _Connection(http.client.HTTPConnection):
    response_class = PacedAnswer


class _SafeConnection(http.client.HTTPSConnection):
    response_class = PacedAnswer


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


class _SafeHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SafeConnection, req, context=_tls_context())


def make_opener() -> urllib.request.OpenerDirector:
    """An opener for http and https alone: no files, no FTP, no redirects by itself, no errors for an answer."""
    opener = urllib.request.OpenerDirector()
    opener.add_handler(urllib.request.ProxyHandler())
    opener.add_handler(_Handler())
    opener.add_handler(_SafeHandler())
    opener.add_handler(urllib.request.UnknownHandler())
    return opener


@cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()
