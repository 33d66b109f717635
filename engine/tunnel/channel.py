"""A TLS connection whose every step ends within one deadline, however slowly the other side talks."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import TypeVar

import msgspec

from engine.json_file import UNREADABLE
from engine.tunnel.identity import Identity

PREFACE_BYTES = 8
"""What a caller sends before TLS begins; who sends anything else costs no handshake."""
MAX_FRAME_BYTES = 16 * 1024
_LENGTH = struct.Struct("!H")
_ALIVE_IDLE_S, _ALIVE_EVERY_S, _ALIVE_COUNT = 10, 5, 3
_UNANSWERED_MS = 20_000
"""A machine that is switched off says nothing: so long may what was sent stay without an answer of its system."""
_Result = TypeVar("_Result")
_Message = TypeVar("_Message", bound=msgspec.Struct)


class Purpose(StrEnum):
    """What a connection is for, as its preface says it."""

    SESSION = "LDTP1 S\n"
    PAIRING = "LDTP1 P\n"


class BrokenTalkError(Exception):
    """The other side did not say what belongs here."""


def serving_context(identity: Identity, clients: Iterable[bytes] | None) -> ssl.SSLContext:
    """Return how we answer: to holders of these certificates alone; None: to anybody, who then has to pair."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity)
    context.num_tickets = 0
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, clients)
    return context


def calling_context(identity: Identity, server: bytes | None) -> ssl.SSLContext:
    """Return how we call: the holder of this certificate alone; None: anybody, who then has to prove to know a code."""
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


def tls_of(connection: socket.socket, context: ssl.SSLContext, *, server_side: bool = False) -> ssl.SSLSocket:
    """Return the connection with TLS, before its handshake; `connection` itself is of no use then.

    Raises:
        OSError: the other side is gone. Of such a connection `ssl` may make one that nobody can close any more.
    """
    connection.getpeername()
    return context.wrap_socket(connection, server_side=server_side, do_handshake_on_connect=False)


def keep_alive(connection: socket.socket) -> None:
    """Have the system end a connection whose other machine is gone, and send what is small at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform.startswith("linux"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ALIVE_IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ALIVE_EVERY_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ALIVE_COUNT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)


class Channel:
    """One connection: handshake, then bytes and messages. All of it until `deadline_s` of the monotonic clock.

    Raises everywhere:
        TimeoutError: at the deadline.
        OSError: for what breaks the connection; `ssl.SSLError` is one.
        BrokenTalkError: for an end in the middle, or what is no message.
    """

    def __init__(self, tls: ssl.SSLSocket, deadline_s: float) -> None:
        self.tls = tls
        self._deadline_s = deadline_s
        tls.setblocking(False)

    def handshake(self) -> bytes:
        """Return the other side's certificate (DER), empty where it has shown none."""
        self._drive(self.tls.do_handshake)
        return self.tls.getpeercert(binary_form=True) or b""

    def send(self, data: bytes) -> None:
        """Send all of `data`."""
        left = memoryview(data)
        while left:
            left = left[self._drive(partial(self.tls.send, left)) :]

    def receive(self, n_bytes: int) -> bytes:
        """Return exactly so many bytes."""
        data = b""
        while len(data) < n_bytes:
            part = self._drive(partial(self.tls.recv, n_bytes - len(data)))
            if not part:
                raise BrokenTalkError("the connection was closed")
            data += part
        return data

    def send_message(self, message: msgspec.Struct) -> None:
        """Send a message as one frame."""
        data = msgspec.json.encode(message)
        self.send(_LENGTH.pack(len(data)) + data)

    def receive_message(self, kind: type[_Message]) -> _Message:
        """Return the next message, which is of this kind."""
        (length,) = _LENGTH.unpack(self.receive(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise BrokenTalkError(f"it began a message of {length} bytes")
        try:
            return msgspec.json.decode(self.receive(length), type=kind)
        except UNREADABLE:
            raise BrokenTalkError("it sent what is no message") from None

    def close(self) -> None:
        """End the connection; the other side gets what was sent before."""
        shut(self.tls)
        self.tls.close()

    def _drive(self, step: Callable[[], _Result]) -> _Result:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                wait_until(self.tls, self._deadline_s, reading=True)
            except ssl.SSLWantWriteError:
                wait_until(self.tls, self._deadline_s, reading=False)


def shut(connection: socket.socket) -> None:
    """Have whoever waits on a connection see its end; whose it is closes it.

    Not by `SSLSocket.shutdown`: what another thread read or wrote after that would pass without TLS.
    """
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def wait_until(connection: socket.socket, deadline_s: float, *, reading: bool) -> None:
    """Wait until there is something to read, or room to write.

    Raises:
        TimeoutError: at the deadline.
    """
    left_s = deadline_s - time.monotonic()
    those = [connection]
    if left_s <= 0 or not any(select.select(those if reading else [], [] if reading else those, [], left_s)):
        raise TimeoutError("no answer in time")


def read_preface(connection: socket.socket, deadline_s: float) -> Purpose | None:
    """Return what a caller wants, None for one that is no tunnel. Raises as a `Channel`."""
    connection.setblocking(False)
    data = b""
    while len(data) < PREFACE_BYTES:
        wait_until(connection, deadline_s, reading=True)
        part = connection.recv(PREFACE_BYTES - len(data))
        data += part
        if not part or not any(each.value.encode().startswith(data) for each in Purpose):
            return None
    return Purpose(data.decode())
