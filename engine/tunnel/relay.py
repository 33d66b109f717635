"""Bytes from a TLS connection to a plain one and back, in one thread, with a bounded buffer for each direction.

One thread, because OpenSSL does not let two of them use a connection at once.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from contextlib import suppress
from enum import Enum

from engine.tunnel.channel import wait_until

BUFFER_BYTES = 256 * 1024
_RECORD_BYTES = 16 * 1024
"""What one record of TLS holds at most."""
_FLUSH_S = 5.0
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Ended(Enum):
    """Which side was closed, or lost, first."""

    TLS = "tls"
    PLAIN = "plain"


class _Buffer:
    """Bytes on their way: read at one end and written at the other, never moved."""

    def __init__(self) -> None:
        self._view = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0

    @property
    def is_empty(self) -> bool:
        return self._begin == self._end

    @property
    def has_room(self) -> bool:
        return self._end < BUFFER_BYTES

    def fill(self, source: socket.socket) -> bool:
        """Read what is there, as far as there is room; False where the source was closed."""
        while self.has_room:
            try:
                n_bytes = source.recv_into(self._view[self._end :])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return True
            if n_bytes == 0:
                return False
            self._end += n_bytes
            # One call reads one record of TLS at most, but all that is there of a plain connection.
            if not isinstance(source, ssl.SSLSocket) or (n_bytes < _RECORD_BYTES and not source.pending()):
                return True
        return True

    def drain(self, sink: socket.socket) -> None:
        """Write what the sink takes now."""
        while not self.is_empty:
            try:
                self._begin += sink.send(self._view[self._begin : self._end])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
        self._begin = self._end = 0

    def flush(self, sink: socket.socket) -> None:
        """Write all, for some seconds at most."""
        deadline_s = time.monotonic() + _FLUSH_S
        with suppress(OSError):
            self.drain(sink)
            while not self.is_empty:
                wait_until(sink, deadline_s, reading=False)
                self.drain(sink)


def relay(tls: ssl.SSLSocket, plain: socket.socket) -> Ended:
    """Pass bytes on until one side ends, and return which; what it had said is passed on. Both stay open.

    Another thread ends it by shutting one of them down.
    """
    tls.setblocking(False)
    plain.setblocking(False)
    inward, outward = _Buffer(), _Buffer()
    with selectors.DefaultSelector() as selector:
        waiting = {tls: _READ, plain: _READ}
        for each, events in waiting.items():
            selector.register(each, events)
        while True:
            # What TLS has decrypted already, no system tells of.
            timeout_s = 0 if tls.pending() and inward.has_room else None
            ready = {key.fileobj for key, events in selector.select(timeout_s) if events & _READ}
            if tls in ready or timeout_s == 0:
                if not _step(inward, tls, plain):
                    return Ended.TLS
            elif not _write(inward, plain):
                return Ended.PLAIN
            if plain in ready:
                if not _step(outward, plain, tls):
                    return Ended.PLAIN
            elif not _write(outward, tls):
                return Ended.TLS
            for each, into, out_of in ((tls, inward, outward), (plain, outward, inward)):
                events = (_READ if into.has_room else 0) | (0 if out_of.is_empty else _WRITE)
                if events != waiting[each]:
                    _wait_for(selector, each, waiting[each], events)
                    waiting[each] = events


def _wait_for(selector: selectors.BaseSelector, connection: socket.socket, before: int, events: int) -> None:
    """Have the selector tell of other events; of none where a full buffer waits for the other side."""
    if not before:
        selector.register(connection, events)
    elif not events:
        selector.unregister(connection)
    else:
        selector.modify(connection, events)


def _step(buffer: _Buffer, source: socket.socket, sink: socket.socket) -> bool:
    """Read from one side and write to the other; False where the source has ended, and all that it said is on."""
    try:
        goes_on = buffer.fill(source)
    except OSError:
        goes_on = False
    if not goes_on:
        buffer.flush(sink)
        return False
    # A sink that is gone is seen as an end when it is read from.
    _write(buffer, sink)
    return True


def _write(buffer: _Buffer, sink: socket.socket) -> bool:
    try:
        buffer.drain(sink)
    except OSError:
        return False
    return True
