"""Our own bounded hello to RPC endpoints: the engine's client has no timeouts and aborts the process when one fails.

All endpoints are greeted at once from the calling thread, with non-blocking sockets and one deadline.
"""

from __future__ import annotations

import errno
import os
import re
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address

from engine.cancellation import CancelToken

DEFAULT_TIMEOUT_S = 2.0
# From ggml-rpc.cpp (RPC_CMD_HELLO, rpc_msg_hello_req/rsp, RPC_CONN_CAPS_SIZE) and ggml-rpc.h (RPC_PROTO_*_VERSION).
PROTOCOL_VERSION = (7, 0)
_HELLO_COMMAND = 14
_CONN_CAPS_BYTES = 24
_ANSWER_BYTES = 4 + _CONN_CAPS_BYTES
_REQUEST = struct.pack("<BQ", _HELLO_COMMAND, _CONN_CAPS_BYTES) + bytes(_CONN_CAPS_BYTES)
_HEADER = struct.Struct("<Q")
_MAX_PORT = 65535
_ENDPOINT = re.compile(r"([A-Za-z0-9._-]{1,253}):(\d{1,5})", re.ASCII)
_RESET_ON_CLOSE = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
"""SO_LINGER on with no time: closing sends a reset."""
_CONNECTING = {0, errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", errno.EWOULDBLOCK)}


class GreetingStatus(StrEnum):
    """What answered. `BUSY`: connected, but no answer in time, as from a server that serves somebody else."""

    OK = "ok"
    BUSY = "busy"
    NOT_RPC = "not_rpc"
    WRONG_VERSION = "wrong_version"
    REFUSED = "refused"
    TIMED_OUT = "timed_out"
    UNRESOLVED = "unresolved"


@dataclass(frozen=True, slots=True)
class Greeting:
    """The result of a hello. `version` is what an RPC server said it speaks; `sentence` is for people."""

    endpoint: str
    status: GreetingStatus
    sentence: str
    version: tuple[int, int, int] | None = None

    @property
    def ok(self) -> bool:
        return self.status is GreetingStatus.OK


def parse_endpoint(text: str) -> tuple[str, int]:
    """Return host and port of `"host:port"`.

    Raises:
        ValueError: with a sentence. IPv6 addresses are refused because the engine's client cannot use them.
    """
    match = _ENDPOINT.fullmatch(text.strip())
    if match is None or not 0 < int(match.group(2)) <= _MAX_PORT:
        raise ValueError(f'"{text}" is not an endpoint; write HOST:PORT such as "192.168.1.7:50052" (IPv4 or a name)')
    return match.group(1), int(match.group(2))


def greet(host: str, port: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> Greeting:
    """Say hello to one endpoint, within `timeout_s` in all."""
    endpoint = f"{host}:{port}"
    return greet_all([endpoint], timeout_s)[endpoint]


def greet_all(
    endpoints: Iterable[str], timeout_s: float = DEFAULT_TIMEOUT_S, *, cancel: CancelToken | None = None
) -> dict[str, Greeting]:
    """Say hello to all endpoints in parallel, within `timeout_s` in all; on cancel, what has no result times out.

    Raises:
        ValueError: for a text that is no endpoint.
    """
    targets = {endpoint: parse_endpoint(endpoint) for endpoint in endpoints}
    if not targets:
        return {}
    deadline_s = time.monotonic() + timeout_s
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        wake = stack.enter_context(_Wake(selector))
        if cancel is not None:
            stack.enter_context(cancel.waking(wake))
        addresses = _Addresses({host for host, _ in targets.values()}, wake)
        talks = [stack.enter_context(_Talk(endpoint, *target, timeout_s)) for endpoint, target in targets.items()]
        while pending := [talk for talk in talks if talk.result is None]:
            for talk in pending:
                talk.begin(addresses, selector)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or (cancel is not None and cancel.cancelled):
                break
            if all(talk.result is None for talk in pending):
                for key, _ in selector.select(left_s):
                    key.data(selector)
        return {talk.endpoint: talk.result or talk.give_up() for talk in talks}


class _Wake:
    """Lets other threads end a `select`; harmless to call after it was closed."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._sender, self._receiver = socket.socketpair()
        self._sender.setblocking(False)
        selector.register(self._receiver, selectors.EVENT_READ, self._drain)

    def __enter__(self) -> _Wake:
        return self

    def __exit__(self, *_: object) -> None:
        self._sender.close()
        self._receiver.close()

    def __call__(self) -> None:
        with suppress(OSError):  # Closed, or full of earlier wake-ups.
            self._sender.send(b"w")

    def _drain(self, _: selectors.BaseSelector) -> None:
        self._receiver.recv(64)


class _Addresses:
    """IPv4 addresses of hosts. Names are looked up in threads, because a look-up cannot be given a time limit."""

    def __init__(self, hosts: set[str], wake: _Wake) -> None:
        self._found: dict[str, str | None] = {}
        for host in hosts:
            try:
                self._found[host] = str(IPv4Address(host))
            except ValueError:
                threading.Thread(target=self._look_up, args=(host, wake), name=f"resolve-{host}", daemon=True).start()

    def get(self, host: str) -> tuple[bool, str | None]:
        """Return whether the look-up is over, and the address if there is one."""
        return host in self._found, self._found.get(host)

    def _look_up(self, host: str, wake: _Wake) -> None:
        try:
            found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
            self._found[host] = str(found[0][4][0])
        except (OSError, UnicodeError, IndexError):
            self._found[host] = None
        wake()


class _Talk:
    """One hello in progress: look-up, connect, send, receive at most one answer."""

    def __init__(self, endpoint: str, host: str, port: int, timeout_s: float) -> None:
        self.endpoint = endpoint
        self.result: Greeting | None = None
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._connected = False
        self._received = b""

    def __enter__(self) -> _Talk:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is None:
            return
        if self.result is None or not self.result.ok:
            # A server that takes this connection up later must find it reset: answering a closed one could
            # end it with SIGPIPE.
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._socket.close()

    def begin(self, addresses: _Addresses, selector: selectors.BaseSelector) -> None:
        """Connect as soon as the address is known."""
        if self._socket is not None:
            return
        known, address = addresses.get(self._host)
        if not known:
            return
        if address is None:
            self._end(
                GreetingStatus.UNRESOLVED, f'"{self._host}" has no IPv4 address; check the name, or write the address'
            )
            return
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        code = self._socket.connect_ex((address, self._port))
        if code in _CONNECTING:
            selector.register(self._socket, selectors.EVENT_WRITE, self._on_connected)
        else:
            self._refused(code)

    def give_up(self) -> Greeting:
        """Return the result at the deadline."""
        if self._connected and self._received:
            return self._greeting(GreetingStatus.NOT_RPC, "began an answer and did not finish it; is it an RPC worker?")
        if self._connected:
            return self._greeting(
                GreetingStatus.BUSY,
                f"took the connection but did not answer within {self._timeout_s:g} s: an RPC worker serves "
                "one program at a time, so end the program that uses it",
            )
        return self._greeting(
            GreetingStatus.TIMED_OUT,
            f"did not answer within {self._timeout_s:g} s; check the address, the network and its firewall",
        )

    def _on_connected(self, selector: selectors.BaseSelector) -> None:
        assert self._socket is not None
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code != 0:
            selector.unregister(self._socket)
            self._refused(code)
            return
        self._connected = True
        try:
            self._socket.send(_REQUEST)  # 33 bytes fit any empty socket buffer.
        except OSError:
            selector.unregister(self._socket)
            self._closed()
            return
        selector.modify(self._socket, selectors.EVENT_READ, self._on_readable)

    def _on_readable(self, selector: selectors.BaseSelector) -> None:
        assert self._socket is not None
        try:
            part = self._socket.recv(_HEADER.size + _ANSWER_BYTES - len(self._received))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self._received += part
        if part and not self._judge():
            return
        selector.unregister(self._socket)
        if self.result is None:
            self._closed()

    def _judge(self) -> bool:
        """Set the result if enough was received; return whether that is so."""
        if len(self._received) < _HEADER.size:
            return False
        if _HEADER.unpack_from(self._received)[0] != _ANSWER_BYTES:
            self._end(GreetingStatus.NOT_RPC, "answers, but not as an RPC worker does; check the port")
            return True
        if len(self._received) < _HEADER.size + _ANSWER_BYTES:
            return False
        version = (self._received[_HEADER.size], self._received[_HEADER.size + 1], self._received[_HEADER.size + 2])
        if version[0] != PROTOCOL_VERSION[0] or version[1] > PROTOCOL_VERSION[1]:
            theirs, ours = f"{version[0]}.{version[1]}", f"{PROTOCOL_VERSION[0]}.{PROTOCOL_VERSION[1]}"
            self._end(
                GreetingStatus.WRONG_VERSION,
                f"speaks version {theirs} of the RPC protocol and this program {ours}; run the same release on both",
                version,
            )
        else:
            self._end(GreetingStatus.OK, "answers", version)
        return True

    def _closed(self) -> None:
        self._end(
            GreetingStatus.NOT_RPC,
            "closed the connection without an answer: it is no RPC worker, or one of another version; check the port, "
            "and run the same release on both",
        )

    def _refused(self, code: int) -> None:
        if code in (errno.ECONNREFUSED, getattr(errno, "WSAECONNREFUSED", errno.ECONNREFUSED)):
            self._end(GreetingStatus.REFUSED, "refused the connection: nothing listens there; start the RPC worker")
        else:
            self._end(
                GreetingStatus.REFUSED, f"cannot be reached ({os.strerror(code)}); check the address and the network"
            )

    def _end(self, status: GreetingStatus, words: str, version: tuple[int, int, int] | None = None) -> None:
        self.result = self._greeting(status, words, version)

    def _greeting(self, status: GreetingStatus, words: str, version: tuple[int, int, int] | None = None) -> Greeting:
        sentence = f"{words}." if status is GreetingStatus.UNRESOLVED else f"{self.endpoint} {words}."
        return Greeting(self.endpoint, status, sentence.replace("?.", "?"), version)
