"""TLS streams of asyncio between two machines: contexts with pinned certificates, messages, and passing bytes on.

Bounds in time are the caller's (`asyncio.timeout`): they hold for all of a conversation, however slowly the other side
talks. Bounds in size are here.
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
"""What a caller sends before TLS begins; who sends anything else costs no handshake."""
MAX_FRAME_BYTES = 16 * 1024
BUFFER_BYTES = 256 * 1024
"""For each direction of each stream; a source is not read while so much of it waits to be written."""
_LENGTH = struct.Struct("!H")
_CLOSE_S = 5.0
"""For what was written last to be taken by the other side."""
_ALIVE_IDLE_S, _ALIVE_EVERY_S, _ALIVE_COUNT = 10, 5, 3
_UNANSWERED_MS = 20_000
"""A machine that is switched off says nothing: so long may what was sent stay without an answer of its system."""
_Message = TypeVar("_Message", bound=msgspec.Struct)


class Purpose(StrEnum):
    """What a connection is for, as its preface says it."""

    SESSION = "LDTP1 S\n"
    PAIRING = "LDTP2 P\n"
    """With a number of its own: version 1 paired with codes of 8 letters and another exchange."""


class BrokenTalkError(Exception):
    """The other side did not say what belongs here, or ended in the middle."""


class Stream(asyncio.BufferedProtocol):
    """Both directions of one connection. Bytes wait here for `receive`, or go on to another stream while `relay` runs.

    A protocol of asyncio and not its `StreamReader`: bytes that are passed on need no task to wake up, which is most of
    the time of a round trip.

    Raises everywhere:
        OSError: for what breaks the connection; `ssl.SSLError` is one.
        BrokenTalkError: for an end in the middle, or bytes that are no message.
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
        if self._sink is not None:
            self._sink.transport.pause_reading()

    def resume_writing(self) -> None:
        self._may_write.set()
        if self._sink is not None and not self._sink._ended:
            self._sink.transport.resume_reading()

    # ------------------------------------------------------------------ called by us

    @property
    def certificate(self) -> bytes:
        """The other side's certificate (DER), empty if it has shown none."""
        tls = self.transport.get_extra_info("ssl_object")
        return tls.getpeercert(binary_form=True) or b""

    @property
    def is_broken(self) -> bool:
        """Whether the connection was lost by an error, and not ended."""
        return self._error is not None

    async def send(self, data: bytes) -> None:
        """Send `data`, and wait for room for more."""
        self._require_connection()
        self.transport.write(data)
        await self._may_write.wait()
        self._require_connection()

    async def receive(self, n_bytes: int) -> bytes:
        """Return exactly so many bytes, which are fewer than `BUFFER_BYTES`."""
        while len(self._buffer) < n_bytes:
            if self._ended:
                raise self._error or BrokenTalkError("the connection was closed")
            await self._wait()
        data = bytes(self._buffer[:n_bytes])
        del self._buffer[:n_bytes]
        return data

    async def send_message(self, message: msgspec.Struct) -> None:
        """Send a message as one frame."""
        data = msgspec.json.encode(message)
        await self.send(_LENGTH.pack(len(data)) + data)

    async def receive_message(self, kind: type[_Message]) -> _Message:
        """Return the next message, which must be of this kind."""
        (length,) = _LENGTH.unpack(await self.receive(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise BrokenTalkError(f"it began a message of {length} bytes")
        try:
            return msgspec.json.decode(await self.receive(length), type=kind)
        except UNREADABLE:
            raise BrokenTalkError("it sent what is no message") from None

    async def wait_for_end(self) -> None:
        """Wait until the other side ends the connection; bytes that go to no other stream are dropped until then."""
        while not self._ended:
            if self._sink is None:
                self._buffer.clear()
                self.transport.resume_reading()
            await self._wait()

    def pass_on_to(self, sink: Stream) -> None:
        """Have `sink` get what comes from here, beginning with what has come already."""
        self._sink = sink
        sink.transport.write(bytes(self._buffer))
        self._buffer.clear()
        if sink._may_write.is_set() and not self._ended:
            self.transport.resume_reading()

    async def close(self) -> None:
        """End the connection once the other side's system has what was written, within some seconds."""
        self.transport.close()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    while not self._lost:
                        await self._wait()
        finally:
            # Also if it is cancelled: the caller closes the socket, whose number the loop must not watch any more.
            self.transport.abort()

    def abort(self) -> None:
        """End the connection now."""
        self.transport.abort()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _require_connection(self) -> None:
        if self._lost:
            raise self._error or BrokenTalkError("the connection was closed")


async def tls_stream(connection: socket.socket, context: ssl.SSLContext, *, server_side: bool = False) -> Stream:
    """Return a TLS stream on the connection after its handshake; the stream owns the connection then.

    asyncio's `start_tls` is not used: it loses what its reader has read already, and a caller's handshake comes right
    after its preface.

    Raises:
        OSError: if the handshake fails. The connection is closed then.
    """
    loop = asyncio.get_running_loop()
    if server_side:
        _, stream = await loop.connect_accepted_socket(Stream, connection, ssl=context, ssl_shutdown_timeout=_CLOSE_S)
    else:
        _, stream = await loop.create_connection(
            Stream, sock=connection, ssl=context, server_hostname="", ssl_shutdown_timeout=_CLOSE_S
        )
    return stream


async def plain_stream(connection: socket.socket) -> Stream:
    """Return a stream on a connection of this machine."""
    _, stream = await asyncio.get_running_loop().create_connection(Stream, sock=connection)
    return stream


async def relay(one: Stream, other: Stream) -> None:
    """Pass bytes on in both directions until one side ends, and close both.

    What a side had said before its end is written to the other one first. A connection that breaks ends both at once.
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
    finally:
        for each in ends:
            each.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        await asyncio.gather(one.close(), other.close())


async def read_preface(connection: socket.socket) -> Purpose | None:
    """Return what a caller wants, None for a caller that is no tunnel. Raises `OSError`."""
    loop, data = asyncio.get_running_loop(), b""
    connection.setblocking(False)
    while len(data) < PREFACE_BYTES:
        part = await loop.sock_recv(connection, PREFACE_BYTES - len(data))
        data += part
        if not part or not any(each.value.encode().startswith(data) for each in Purpose):
            return None
    return Purpose(data.decode())


def serving_context(identity: Identity, clients: Iterable[bytes] | None) -> ssl.SSLContext:
    """Return the context that admits holders of these certificates alone; None: anybody, who then has to pair."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity)
    context.num_tickets = 0
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, clients)
    return context


def calling_context(identity: Identity, server: bytes | None) -> ssl.SSLContext:
    """Return the context that calls the holder of this certificate alone; None: anybody, who has to prove the code."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, identity)
    # A pinned certificate says who it is; its name and its dates say nothing.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE if server is None else ssl.CERT_REQUIRED
    _trust(context, () if server is None else (server,))
    return context


def _context(protocol: int, identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(identity.path)
    return context


def _trust(context: ssl.SSLContext, certificates: Iterable[bytes]) -> None:
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    for each in certificates:
        # One that is none, in a file that was damaged, is nobody's; the others count as ever.
        with suppress(ssl.SSLError, ValueError):
            context.load_verify_locations(cadata=each)


def keep_alive(connection: socket.socket) -> None:
    """Have the system end a connection whose other machine is gone, and send what is small at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform.startswith("linux"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ALIVE_IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ALIVE_EVERY_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ALIVE_COUNT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
