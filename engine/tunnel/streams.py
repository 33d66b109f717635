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

from engine.json_file import UNREADABLE
from engine.tunnel.identity import Identity

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


class Stream:
    """Both directions of one connection.

    Raises everywhere:
        OSError: for what breaks the connection; `ssl.SSLError` is one.
        BrokenTalkError: for an end in the middle, or bytes that are no message.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        # Writing waits at the same limit as reading does.
        writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)

    @property
    def certificate(self) -> bytes:
        """The other side's certificate (DER), empty if it has shown none."""
        tls = self.writer.get_extra_info("ssl_object")
        return tls.getpeercert(binary_form=True) or b""

    async def send(self, data: bytes) -> None:
        """Send all of `data`."""
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self, n_bytes: int) -> bytes:
        """Return exactly so many bytes."""
        try:
            return await self.reader.readexactly(n_bytes)
        except asyncio.IncompleteReadError:
            raise BrokenTalkError("the connection was closed") from None

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

    async def close(self) -> None:
        """End the connection once the other side has what was written, within some seconds."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                self.writer.close()
                await self.writer.wait_closed()
        except (OSError, ssl.SSLError):  # TimeoutError is one
            pass
        finally:
            self.writer.transport.abort()


async def tls_stream(connection: socket.socket, context: ssl.SSLContext, *, server_side: bool = False) -> Stream:
    """Return a TLS stream on the connection after its handshake; the stream owns the connection then.

    asyncio's `start_tls` is not used: it loses what its reader has read already, and a caller's handshake comes right
    after its preface.

    Raises:
        OSError: if the handshake fails. The connection is closed then.
    """
    reader = asyncio.StreamReader(limit=BUFFER_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    loop = asyncio.get_running_loop()
    if server_side:
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, connection, ssl=context, ssl_shutdown_timeout=_CLOSE_S
        )
    else:
        transport, _ = await loop.create_connection(
            lambda: protocol, sock=connection, ssl=context, server_hostname="", ssl_shutdown_timeout=_CLOSE_S
        )
    return Stream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


async def plain_stream(connection: socket.socket) -> Stream:
    """Return a stream on a connection of this machine."""
    return Stream(*await asyncio.open_connection(sock=connection, limit=BUFFER_BYTES))


async def relay(one: Stream, other: Stream) -> None:
    """Pass bytes on in both directions until one side ends, and close both.

    What a side had said before its end is written to the other one first. If a side cannot be written to any more,
    both are ended at once: bytes that wait for somebody who does not read would hold up the next session.
    """
    directions = (asyncio.create_task(_pass_on(one, other)), asyncio.create_task(_pass_on(other, one)))
    try:
        ended, _ = await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        if any(not each.result() for each in ended):
            one.writer.transport.abort()
            other.writer.transport.abort()
    finally:
        for each in directions:
            each.cancel()
        await asyncio.gather(*directions, return_exceptions=True)
        await asyncio.gather(one.close(), other.close())


async def _pass_on(source: Stream, sink: Stream) -> bool:
    """Pass bytes on until the source ends; return False if the sink is gone before."""
    while True:
        try:
            data = await source.reader.read(BUFFER_BYTES)
        except OSError:
            data = b""
        if not data:
            return True
        try:
            await sink.send(data)
        except OSError:
            return False


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
