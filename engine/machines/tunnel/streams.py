"""TLS streams of asyncio between two machines: contexts with pinned certificates, messages, and forwarding.

This module limits sizes but not times. Code that uses a stream sets an `asyncio.timeout` around a whole exchange of
messages, so that a slow sender cannot extend it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from typing import TypeVar

import msgspec

from engine.base.json_file import UNREADABLE
from engine.machines.tunnel.identity import Identity

PREFACE_BYTES = 8
"""Length of the preface: the bytes that a client sends before TLS. The listener closes a connection that begins with
other bytes.
"""
MAX_FRAME_BYTES = 16 * 1024
BUFFER_BYTES = 256 * 1024
"""Size in bytes of the buffer for each direction of a stream.

While the buffer is full, nothing is read from the source.
"""
_LENGTH = struct.Struct("!H")
_CLOSE_S = 5.0
"""Time limit in seconds for sending the last bytes when a stream is closed."""
_ALIVE_IDLE_S, _ALIVE_EVERY_S, _ALIVE_COUNT = 10, 5, 3
_UNANSWERED_MS = 20_000
"""Milliseconds that sent bytes may stay unacknowledged (TCP_USER_TIMEOUT).

A machine that was switched off does not acknowledge them, and its connection ends.
"""
_NO_CHECK_TIME = 0x200000
"""OpenSSL's flag X509_V_FLAG_NO_CHECK_TIME, for which Python has no name: certificates do not expire."""
_Message = TypeVar("_Message", bound=msgspec.Struct)


class Purpose(StrEnum):
    """The purpose of a connection. Its value is the preface: the bytes that a client sends before TLS."""

    SESSION = "LDTP1 S\n"
    PAIRING = "LDTP2 P\n"
    """Preface of a connection that pairs two machines, in version 2 of pairing.

    Version 1 used codes of 8 letters and another exchange of messages.
    """
    ASK = "LDTP3 A\n"
    """Preface of a connection whose client first sends a request (`ClientRequest`), which can name a device.

    With `SESSION` the client names no device, because older releases lend a single one.
    """


class BrokenTalkError(Exception):
    """The other side violated the protocol, or closed the connection in the middle of a message."""


class ClosedTalkError(BrokenTalkError):
    """The other side closed the connection before an expected message."""

    def __init__(self) -> None:
        super().__init__("the connection was closed")


class Stream(asyncio.BufferedProtocol):
    """Both directions of one connection. Bytes are buffered for `receive`, or forwarded while `relay` runs.

    This is an asyncio protocol instead of a `StreamReader`, because it forwards bytes without waking a task. Waking a
    task would take most of the time of a round trip.

    All methods raise:
        OSError: if the connection breaks, also for errors of TLS (`ssl.SSLError` is a subclass).
        BrokenTalkError: if the connection ends in the middle of a message, or received bytes are not a valid message.
    """

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._read = memoryview(bytearray(BUFFER_BYTES))
        self._buffer = bytearray()
        self._sink: Stream | None = None
        self._ended = self._lost = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._may_write = asyncio.Event()
        self._may_write.set()

    # ------------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=BUFFER_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:
        # Without a buffer of ours each read would make one of 256 KiB, which the system has to map and to clear.
        return self._read

    def buffer_updated(self, nbytes: int) -> None:
        data = self._read[:nbytes]
        if self._sink is not None:
            if not self._sink._lost:
                # A copy: a transport keeps what it cannot send at once.
                self._sink.transport.write(bytes(data))
            return
        self._buffer += data
        if len(self._buffer) >= BUFFER_BYTES:
            self.transport.pause_reading()
        self._changed.set()

    def eof_received(self) -> bool:
        self._ended = True
        self._changed.set()
        # Closed by `close`; TLS has no half of a connection, and closes at once whatever this says.
        return self.transport.get_extra_info("sslcontext") is None

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = self._lost = True
        self._error = exc
        self._may_write.set()
        self._changed.set()

    def pause_writing(self) -> None:
        self._may_write.clear()
        # `relay` makes each stream the sink of the other one, so our sink is also the source of what we write.
        if self._sink is not None:
            self._sink.transport.pause_reading()

    def resume_writing(self) -> None:
        self._may_write.set()
        if self._sink is not None and not self._sink._ended:
            self._sink.transport.resume_reading()

    # ------------------------------------------------------------------ called by us

    @property
    def certificate(self) -> bytes:
        """The certificate of the other side (DER); empty if it has sent none."""
        tls = self.transport.get_extra_info("ssl_object")
        return tls.getpeercert(binary_form=True) or b""

    @property
    def is_broken(self) -> bool:
        """Whether the connection was lost by an error; False if it is open or was closed normally."""
        return self._error is not None

    async def send(self, data: bytes) -> None:
        """Send `data`, and wait until the send buffer has room for more."""
        self._require_connection()
        self.transport.write(data)
        await self._may_write.wait()
        self._require_connection()

    async def receive(self, n_bytes: int) -> bytes:
        """Return exactly the next `n_bytes` bytes. The number must be less than `BUFFER_BYTES`."""
        while len(self._buffer) < n_bytes:
            if self._ended:
                raise self._error or ClosedTalkError
            await self._wait()
        data = bytes(self._buffer[:n_bytes])
        del self._buffer[:n_bytes]
        return data

    async def send_message(self, message: msgspec.Struct) -> None:
        """Send a message as JSON after its length in two bytes."""
        data = msgspec.json.encode(message)
        await self.send(_LENGTH.pack(len(data)) + data)

    async def receive_message(self, kind: type[_Message]) -> _Message:
        """Return the next message, decoded as `kind`."""
        (length,) = _LENGTH.unpack(await self.receive(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise BrokenTalkError(f"it began a message of {length} bytes")
        try:
            return msgspec.json.decode(await self.receive(length), type=kind)
        except UNREADABLE:
            raise BrokenTalkError("it sent an invalid message") from None

    async def wait_for_end(self) -> None:
        """Wait until the other side closes the connection.

        Bytes that arrive meanwhile are discarded, except while `relay` forwards them.
        """
        while not self._ended:
            if self._sink is None:
                self._buffer.clear()
                self.transport.resume_reading()
            await self._wait()

    def pass_on_to(self, sink: Stream) -> None:
        """Forward the buffered bytes and all later ones to `sink`."""
        self._sink = sink
        sink.transport.write(bytes(self._buffer))
        self._buffer.clear()
        # The write may have filled `sink`. Reading then goes on in its `resume_writing`.
        if sink._may_write.is_set() and not self._ended:
            self.transport.resume_reading()

    async def close(self) -> None:
        """Send the buffered bytes and close the connection. Takes at most some seconds."""
        self.transport.close()
        # Limited: the other side may take no more bytes, or with TLS never send its close_notify.
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    while not self._lost:
                        await self._wait()
        finally:
            # Also if it is cancelled: the caller closes the socket, whose number the loop must not watch any more.
            self.transport.abort()

    def abort(self) -> None:
        """Close the connection at once. Bytes that are not sent yet are discarded."""
        self.transport.abort()

    async def _wait(self) -> None:
        # Callers have just tested their condition in the same step of the loop, so clearing loses no event.
        self._changed.clear()
        await self._changed.wait()

    def _require_connection(self) -> None:
        if self._lost:
            raise self._error or ClosedTalkError


async def tls_stream(connection: socket.socket, context: ssl.SSLContext, *, server_side: bool = False) -> Stream:
    """Do the TLS handshake on a connection and return the stream, which then owns the connection.

    `start_tls` of asyncio is not used: it loses bytes that its reader has already read. A client sends the handshake
    directly after the preface, so both may arrive together.

    `server_side`: whether this machine is the server of the handshake.

    Raises:
        OSError: if the handshake fails. The connection is then closed.
    """
    loop = asyncio.get_running_loop()
    if server_side:
        _, stream = await loop.connect_accepted_socket(Stream, connection, ssl=context, ssl_shutdown_timeout=_CLOSE_S)
    else:
        # asyncio demands a name for TLS on a given socket; with an empty one it sends no SNI.
        _, stream = await loop.create_connection(
            Stream, sock=connection, ssl=context, server_hostname="", ssl_shutdown_timeout=_CLOSE_S
        )
    return stream


async def plain_stream(connection: socket.socket) -> Stream:
    """Return a stream without TLS on a local connection. The stream closes the connection at its end."""
    _, stream = await asyncio.get_running_loop().create_connection(Stream, sock=connection)
    return stream


async def relay(one: Stream, other: Stream) -> bool:
    """Forward bytes in both directions until one stream ends, then close both streams.

    Return True if `other` ended first. Bytes that arrived before the end are still forwarded, unless a connection
    breaks.
    """
    one.pass_on_to(other)
    other.pass_on_to(one)
    ends = [asyncio.create_task(each.wait_for_end()) for each in (one, other)]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if one.is_broken or other.is_broken:
            # Bytes that wait for a side that does not read would hold up the next session.
            one.abort()
            other.abort()
        return ends[1].done() and not ends[0].done()
    finally:
        for each in ends:
            each.cancel()
        try:
            await asyncio.gather(*ends, return_exceptions=True)
            await asyncio.gather(one.close(), other.close())
        finally:
            # Also if it is cancelled a second time here: the worker would stay busy with this connection.
            one.abort()
            other.abort()


async def read_preface(connection: socket.socket) -> Purpose | None:
    """Read the preface of a caller and return its purpose; None if it is not a valid preface. Raises `OSError`."""
    loop, data = asyncio.get_running_loop(), b""
    connection.setblocking(False)
    while len(data) < PREFACE_BYTES:
        part = await loop.sock_recv(connection, PREFACE_BYTES - len(data))
        data += part
        # Compared after each part: a stranger is closed at the first wrong byte and does not hold a place until the
        # time-out.
        if not part or not any(each.value.encode().startswith(data) for each in Purpose):
            return None
    return Purpose(data.decode())


def serving_context(identity: Identity, clients: Iterable[bytes] | None) -> ssl.SSLContext:
    """Return the server's TLS context for a connection to the listener.

    `clients`: certificates (DER) of the only clients to accept; None accepts any client, which must then pair.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity)
    # No session tickets: each session has a context of its own, so none could be redeemed.
    context.num_tickets = 0
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, clients)
    return context


def calling_context(identity: Identity, server: bytes | None) -> ssl.SSLContext:
    """Return the client's TLS context for a connection to another machine.

    `server`: certificate (DER) of the only server to accept; None accepts any, which must then prove that it knows
    the pairing code.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT, identity)
    # A pinned certificate says who it is; its name and its dates say nothing.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE if server is None else ssl.CERT_REQUIRED
    _trust(context, () if server is None else (server,))
    return context


def _context(protocol: int, identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    # Both ends are this program, so there is no older peer to serve.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(identity.path)
    return context


def _trust(context: ssl.SSLContext, certificates: Iterable[bytes]) -> None:
    # A computer whose clock has stopped begins in 1970, before the first day of every certificate.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    for each in certificates:
        # An invalid certificate in a damaged file of pairings is skipped; the others still count.
        with suppress(ssl.SSLError, ValueError):
            context.load_verify_locations(cadata=each)


def keep_alive(connection: socket.socket) -> None:
    """Enable TCP keep-alive on a connection, and disable Nagle's algorithm.

    With keep-alive, the system ends the connection if the other machine is gone.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform.startswith("linux"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ALIVE_IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ALIVE_EVERY_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ALIVE_COUNT)
        # It also ends keep-alive: with this option the number of probes does not count (tcp(7)).
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
