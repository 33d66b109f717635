"""TLS streams of asyncio between two machines: contexts with pinned certificates, messages, and forwarding.

Time limits are the caller's (`asyncio.timeout`): they bound a whole conversation, however slowly the other side sends.
Size limits are here.
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
"""Bytes that a caller sends before TLS begins; any other caller costs no handshake."""
MAX_FRAME_BYTES = 16 * 1024
BUFFER_BYTES = 256 * 1024
"""Buffer of each direction of each stream; while it is full, the source is not read."""
_LENGTH = struct.Struct("!H")
_CLOSE_S = 5.0
"""Time for the other side to receive the last bytes on closing."""
_ALIVE_IDLE_S, _ALIVE_EVERY_S, _ALIVE_COUNT = 10, 5, 3
_UNANSWERED_MS = 20_000
"""Time that sent bytes may stay unacknowledged: a machine that was switched off does not answer."""
_Message = TypeVar("_Message", bound=msgspec.Struct)


class Purpose(StrEnum):
    """The purpose of a connection; its value is the preface."""

    SESSION = "LDTP1 S\n"
    PAIRING = "LDTP2 P\n"
    """Version 2: version 1 paired with codes of 8 letters and another exchange."""
    ASK = "LDTP3 A\n"
    """A paired machine asks for the offer, or for a session with a device by its name. `SESSION` has no name."""


class BrokenTalkError(Exception):
    """The other side broke the protocol, or ended in the middle of a message."""


class ClosedTalkError(BrokenTalkError):
    """The other side closed the connection before it had said what was expected."""

    def __init__(self) -> None:
        super().__init__("the connection was closed")


class Stream(asyncio.BufferedProtocol):
    """Both directions of one connection. Bytes are buffered for `receive`, or forwarded while `relay` runs.

    This is an asyncio protocol and not a `StreamReader`: forwarding then wakes no task, which would be most of the time
    of a round trip.

    All methods raise:
        OSError: if the connection breaks; `ssl.SSLError` is one.
        BrokenTalkError: if it ends in the middle, or bytes are not a message.
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
        """The other side's certificate (DER), empty if it has sent none."""
        tls = self.transport.get_extra_info("ssl_object")
        return tls.getpeercert(binary_form=True) or b""

    @property
    def is_broken(self) -> bool:
        """Whether the connection was lost by an error, rather than closed."""
        return self._error is not None

    async def send(self, data: bytes) -> None:
        """Send `data`, and wait until there is room for more."""
        self._require_connection()
        self.transport.write(data)
        await self._may_write.wait()
        self._require_connection()

    async def receive(self, n_bytes: int) -> bytes:
        """Return exactly `n_bytes`, which must be less than `BUFFER_BYTES`."""
        while len(self._buffer) < n_bytes:
            if self._ended:
                raise self._error or ClosedTalkError
            await self._wait()
        data = bytes(self._buffer[:n_bytes])
        del self._buffer[:n_bytes]
        return data

    async def send_message(self, message: msgspec.Struct) -> None:
        """Send a message as one frame."""
        data = msgspec.json.encode(message)
        await self.send(_LENGTH.pack(len(data)) + data)

    async def receive_message(self, kind: type[_Message]) -> _Message:
        """Return the next message, which must be of type `kind`."""
        (length,) = _LENGTH.unpack(await self.receive(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise BrokenTalkError(f"it began a message of {length} bytes")
        try:
            return msgspec.json.decode(await self.receive(length), type=kind)
        except UNREADABLE:
            raise BrokenTalkError("it sent an invalid message") from None

    async def wait_for_end(self) -> None:
        """Wait until the other side closes the connection. Bytes without a sink are discarded."""
        while not self._ended:
            if self._sink is None:
                self._buffer.clear()
                self.transport.resume_reading()
            await self._wait()

    def pass_on_to(self, sink: Stream) -> None:
        """Forward bytes to `sink`, the buffered ones first."""
        self._sink = sink
        sink.transport.write(bytes(self._buffer))
        self._buffer.clear()
        # The write may have filled `sink`. Reading then goes on in its `resume_writing`.
        if sink._may_write.is_set() and not self._ended:
            self.transport.resume_reading()

    async def close(self) -> None:
        """Close the connection after the written bytes were sent, within some seconds."""
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
        """Close the connection at once."""
        self.transport.abort()

    async def _wait(self) -> None:
        # Callers have just tested their condition in the same step of the loop, so clearing loses no event.
        self._changed.clear()
        await self._changed.wait()

    def _require_connection(self) -> None:
        if self._lost:
            raise self._error or ClosedTalkError


async def tls_stream(connection: socket.socket, context: ssl.SSLContext, *, server_side: bool = False) -> Stream:
    """Return a TLS stream on the connection after the handshake. The stream then owns the connection.

    `start_tls` of asyncio is not used: it loses bytes that its reader has already read, and a caller's handshake
    directly follows its preface.

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
    """Return a stream on a local connection, without TLS."""
    _, stream = await asyncio.get_running_loop().create_connection(Stream, sock=connection)
    return stream


async def relay(one: Stream, other: Stream) -> None:
    """Forward bytes in both directions until one side ends; then close both.

    Bytes that a side sent before its end are written to the other one first. A broken connection ends both at once.
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
    """Return the purpose of a caller, None for a caller that is not a tunnel. Raises `OSError`."""
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
    """Return the TLS context that admits only holders of these certificates; None admits anyone, who must then pair."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity)
    # No session tickets: each session has a context of its own, so none could be redeemed.
    context.num_tickets = 0
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, clients)
    return context


def calling_context(identity: Identity, server: bytes | None) -> ssl.SSLContext:
    """Return the TLS context that calls only the holder of this certificate; None calls anyone, who must prove the
    code."""
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
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    for each in certificates:
        # One that is none, in a file that was damaged, is nobody's; the others count as ever.
        with suppress(ssl.SSLError, ValueError):
            context.load_verify_locations(cadata=each)


def keep_alive(connection: socket.socket) -> None:
    """Enable keep-alive, which ends a connection to a machine that is gone, and disable Nagle's algorithm."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform.startswith("linux"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ALIVE_IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ALIVE_EVERY_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ALIVE_COUNT)
        # It also ends keep-alive: with this option the number of probes does not count (tcp(7)).
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
