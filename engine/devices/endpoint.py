"""A handshake with RPC endpoints, limited in time and size, before the engine connects to them.

The engine's RPC client has no time-outs, and aborts the process when a connection fails. It also trusts every number in
an answer, and creates as many devices as a server claims. So this module first sends the requests that the engine will
send, and checks the answers. One call handles all endpoints in the calling thread, with non-blocking sockets and a
common deadline.
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
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, suppress
from enum import StrEnum
from ipaddress import IPv4Address

from msgspec import Struct

from engine.base.cancellation import CancelToken
from engine.base.language import tr
from engine.base.texts import show

DEFAULT_TIMEOUT_S = 2.0
# From ggml-rpc.cpp (rpc_cmd, the rpc_msg_* structs, RPC_CONN_CAPS_SIZE) and ggml-rpc.h (RPC_PROTO_*_VERSION).
PROTOCOL_VERSION = (7, 0)
_GET_ALIGNMENT, _GET_MAX_SIZE, _GET_DEVICE_MEMORY, _HELLO, _DEVICE_COUNT = 1, 2, 11, 14, 15
_CONN_CAPS_BYTES = 24
_HEADER = struct.Struct("<Q")
_DEVICE = struct.Struct("<I")
_MEMORY = struct.Struct("<QQ")

MAX_DEVICES = 64
"""Largest number of devices that one server may report; the engine uses at most 16 in total (`llama_max_devices`)."""
MAX_DEVICE_BYTES = 1 << 50
MAX_ALIGNMENT_BYTES = 1 << 20
_MAX_PORT = 65535
NOTICE = b"\xffLDTUNL\n"
"""First bytes of a message from our tunnel.

They differ from every answer of an RPC server, which begins with the length of the answer as a small number.
"""
MAX_NOTICE_BYTES = 1000
# 253 is the longest name of DNS.
_ENDPOINT = re.compile(r"([A-Za-z0-9._-]{1,253}):(\d{1,5})", re.ASCII)
# As of a device id.
_LENT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
# `struct linger` has two `u_short` fields on Windows, and two `int` fields elsewhere.
RESET_ON_CLOSE = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
"""Value of the socket option SO_LINGER with a time-out of zero: closing the socket sends a TCP reset."""
# Windows reports a connection in progress as WSAEWOULDBLOCK.
_CONNECTING = {0, errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", errno.EWOULDBLOCK)}


class GreetingStatus(StrEnum):
    """Result of the handshake with an RPC endpoint.

    `OK`: the server answered all requests with plausible values.
    `BUSY`: connected, but no answer in time; probably the server serves another client.
    `NOT_RPC`: the answer is not that of an RPC server.
    `WRONG_VERSION`: the version of the RPC protocol does not match ours.
    `ABSURD`: an RPC server that reports impossible numbers.
    `SILENT`: an RPC server that did not answer a request after the first one.
    `REFUSED`: the connection was refused, or could not be made.
    `TIMED_OUT`: no connection in time, or no answer in time through a tunnel.
    `UNRESOLVED`: the host name has no IPv4 address.
    `UNTRUSTED`: the other machine's certificate differs from that at pairing, or the machine is not paired any more.
    """

    OK = "ok"
    BUSY = "busy"
    NOT_RPC = "not_rpc"
    WRONG_VERSION = "wrong_version"
    ABSURD = "absurd"
    SILENT = "silent"
    REFUSED = "refused"
    TIMED_OUT = "timed_out"
    UNRESOLVED = "unresolved"
    UNTRUSTED = "untrusted"


class Greeting(Struct, frozen=True):
    """The result of the handshake with one endpoint.

    `sentence`: the result as a sentence for people. `version`: version of the server's RPC protocol; None: unknown.
    """

    endpoint: str
    status: GreetingStatus
    sentence: str
    version: tuple[int, int, int] | None = None

    @property
    def ok(self) -> bool:
        return self.status is GreetingStatus.OK


def parse_endpoint(text: str) -> tuple[str, int]:
    """Return host and port of a text such as `"192.0.2.7:50052"`.

    Raises:
        ValueError: `text` has another form; the message is a sentence for people. IPv6 is refused, because the engine's
            client cannot use it.
    """
    match = _ENDPOINT.fullmatch(text.strip())
    if match is None or not 0 < int(match.group(2)) <= _MAX_PORT:
        raise ValueError(
            tr('"{text}" is not an endpoint; write HOST:PORT such as "192.0.2.7:50052" (IPv4 or a name)', text=text)
        )
    return match.group(1), int(match.group(2))


def parse_lent_endpoint(text: str) -> tuple[str, str]:
    """Return endpoint and device name of `"host:port"` or `"host:port/NAME"`; the name is empty in the first form.

    The second form names one of the devices that a paired machine lends through one port.

    Raises:
        ValueError: `text` has another form; the message is a sentence for people.
    """
    address, slash, name = text.strip().partition("/")
    host, port = parse_endpoint(address)
    if slash and _LENT_NAME.fullmatch(name) is None:
        raise ValueError(
            tr('"{text}" names no device; write HOST:PORT/NAME such as "192.0.2.7:50052/CUDA0"', text=show(text, 120))
        )
    return f"{host}:{port}", name


def greet(host: str, port: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> Greeting:
    """Perform the handshake with one endpoint, within `timeout_s` in total."""
    endpoint = f"{host}:{port}"
    return greet_all([endpoint], timeout_s)[endpoint]


def greet_all(
    endpoints: Iterable[str],
    timeout_s: float = DEFAULT_TIMEOUT_S,
    *,
    routes: Mapping[str, str] | None = None,
    cancel: CancelToken | None = None,
) -> dict[str, Greeting]:
    """Perform the handshake with all endpoints in parallel, within `timeout_s` in total; return results by endpoint.

    An endpoint gets the status `REFUSED` also if this system cannot open another socket.

    `routes`: local address of the tunnel, by endpoint (`routes_of`); an empty address: the tunnel does not exist now.
    `cancel`: when it is set, endpoints that have not answered count as timed out.

    Raises:
        ValueError: for a text that is not an endpoint.
    """
    routes = routes or {}
    asked = {endpoint: routes.get(endpoint, endpoint) for endpoint in endpoints}
    targets = {endpoint: parse_endpoint(address) for endpoint, address in asked.items() if address}
    closed = {endpoint: _unpaired(endpoint) for endpoint, address in asked.items() if not address}
    if not targets:
        return closed
    try:
        return _talk_to(targets, routes, timeout_s, cancel) | closed
    except OSError as error:
        return {each: _unasked(each, error) for each in targets} | closed


def _talk_to(
    targets: Mapping[str, tuple[str, int]], routes: Mapping[str, str], timeout_s: float, cancel: CancelToken | None
) -> dict[str, Greeting]:
    deadline_s = time.monotonic() + timeout_s
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        # A socket pair in the selector: threads that resolve names, and a cancel, end the wait through it.
        wake = stack.enter_context(_Wake(selector))
        if cancel is not None:
            stack.enter_context(cancel.waking(wake))
        addresses = _Addresses({host for host, _ in targets.values()}, wake)
        handshakes = [
            stack.enter_context(_Handshake(endpoint, *target, timeout_s, tunnelled=endpoint in routes))
            for endpoint, target in targets.items()
        ]
        # One deadline for all handshakes: a server that answers slowly cannot take more time than the others.
        while pending := [handshake for handshake in handshakes if handshake.result is None]:
            for handshake in pending:
                handshake.begin(addresses, selector)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or (cancel is not None and cancel.cancelled):
                break
            # `begin` may have ended a handshake (unknown host, no descriptor). Then the list is made again without
            # waiting.
            if all(handshake.result is None for handshake in pending):
                for key, _ in selector.select(left_s):
                    key.data(selector)
        return {handshake.endpoint: handshake.result or handshake.give_up() for handshake in handshakes}


class _Wake:
    """Wakes a thread that blocks in `select` of `selector`, through a socket pair. Call the object to wake the thread.

    Use it as a context manager. A call after the end of the `with` block has no effect.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._sender, self._receiver = socket.socketpair()
        # A full buffer wakes the `select` already, and whoever cancels must not wait for room in it.
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
    """A cache of IPv4 addresses of hosts. Names are resolved in threads, because `getaddrinfo` has no time limit."""

    def __init__(self, hosts: set[str], wake: _Wake) -> None:
        self._found: dict[str, str | None] = {}
        for host in hosts:
            try:
                self._found[host] = str(IPv4Address(host))
            except ValueError:
                # A daemon: a resolver that hangs must not keep the process from ending.
                thread = threading.Thread(target=self._look_up, args=(host, wake), name=f"resolve-{host}", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the system gives us no more threads
                    raise OSError(errno.EAGAIN, str(error)) from None

    def get(self, host: str) -> tuple[bool, str | None]:
        """Return whether the lookup of a host has ended, and the host's address; None: no address."""
        return host in self._found, self._found.get(host)

    def _look_up(self, host: str, wake: _Wake) -> None:
        try:
            found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
            self._found[host] = str(found[0][4][0])
        except (OSError, UnicodeError, IndexError):
            self._found[host] = None
        wake()


_Verdict = tuple[GreetingStatus, str]
_Questions = Generator[tuple[bytes, int], bytes, _Verdict]
"""Type of a generator that conducts one handshake.

It yields pairs (request, number of bytes of the answer). The answer comes back through `send`. At the end, the
generator returns the status, and a text about the server.
"""


class _Handshake:
    """One handshake in progress: resolves the host name, connects, sends the requests, and checks the answers."""

    def __init__(self, endpoint: str, host: str, port: int, timeout_s: float, *, tunnelled: bool) -> None:
        self.endpoint = endpoint
        self._tunnelled = tunnelled
        self.result: Greeting | None = None
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._connected = False
        self._version: tuple[int, int, int] | None = None
        self._has_greeted = False
        self._questions = self._ask()
        self._request, self._answer_bytes = next(self._questions)
        self._received = b""

    def __enter__(self) -> _Handshake:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is None:
            return
        if self.result is None or not self.result.ok:
            # A server that takes this connection up later must find it reset: answering a closed one could
            # end it with SIGPIPE.
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self._socket.close()

    def _ask(self) -> _Questions:
        """Return a generator that makes the requests of a handshake, in the order of llama.cpp's RPC client.

        It yields each request with the length of the answer in bytes. The caller passes the answer to the generator's
        method `send`. At the end the generator returns the status, and the rest of a sentence for the user that begins
        with the endpoint, such as "answers".
        """
        # The order of ggml-rpc.cpp's client: HELLO, DEVICE_COUNT, then alignment, maximum size and memory of each
        # device.
        hello = yield _request(_HELLO, bytes(_CONN_CAPS_BYTES)), 4 + _CONN_CAPS_BYTES
        version = self._version = (hello[0], hello[1], hello[2])
        # As the client of ggml-rpc.cpp decides: another major version, or a newer minor one, is refused.
        if version[0] != PROTOCOL_VERSION[0] or version[1] > PROTOCOL_VERSION[1]:
            theirs, ours = f"{version[0]}.{version[1]}", f"{PROTOCOL_VERSION[0]}.{PROTOCOL_VERSION[1]}"
            words = tr(
                "speaks version {worker_version} of the RPC protocol, but this program speaks version {own_version}; "
                "run the same release on both computers",
                worker_version=theirs,
                own_version=ours,
            )
            return GreetingStatus.WRONG_VERSION, words
        self._has_greeted = True
        (count,) = _DEVICE.unpack((yield _request(_DEVICE_COUNT), _DEVICE.size))
        if not 0 < count <= MAX_DEVICES:
            return _absurd(tr("{count:,} devices", count=count), tr("1 to {max_devices}", max_devices=MAX_DEVICES))
        for index in range(count):
            device = _DEVICE.pack(index)
            (alignment_bytes,) = _HEADER.unpack((yield _request(_GET_ALIGNMENT, device), _HEADER.size))
            # Buffer sizes are rounded up to the alignment; ggml's GGML_PAD needs a power of two.
            if alignment_bytes.bit_count() != 1 or alignment_bytes > MAX_ALIGNMENT_BYTES:
                wanted = tr("a power of two up to {max_alignment_bytes:,}", max_alignment_bytes=MAX_ALIGNMENT_BYTES)
                return _absurd(
                    tr(
                        "a buffer alignment of {alignment:,} bytes for device {index}",
                        alignment=alignment_bytes,
                        index=index,
                    ),
                    wanted,
                )
            (max_bytes,) = _HEADER.unpack((yield _request(_GET_MAX_SIZE, device), _HEADER.size))
            if max_bytes == 0:
                return _absurd(
                    tr("a largest buffer of 0 bytes for device {index}", index=index), tr("more than 0 bytes")
                )
            free_bytes, total_bytes = _MEMORY.unpack((yield _request(_GET_DEVICE_MEMORY, device), _MEMORY.size))
            if max(free_bytes, total_bytes) > MAX_DEVICE_BYTES:
                claimed = tr(
                    "{max:,} bytes of memory for device {index}", max=max(free_bytes, total_bytes), index=index
                )
                return _absurd(claimed, tr("up to {max_device_bytes:,} bytes", max_device_bytes=MAX_DEVICE_BYTES))
        return GreetingStatus.OK, "answers"

    def begin(self, addresses: _Addresses, selector: selectors.BaseSelector) -> None:
        """Start to connect if the host name is resolved; else do nothing, and the caller calls again later.

        `selector`: gets the socket, and reports when it is connected.
        """
        if self._socket is not None:
            return
        known, address = addresses.get(self._host)
        if not known:
            return
        if address is None:
            self._end(
                GreetingStatus.UNRESOLVED,
                tr('"{host}" has no IPv4 address; check the name, or write an IPv4 address instead', host=self._host),
            )
            return
        try:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:  # no descriptors left; those that have one are asked
            self.result = _unasked(self.endpoint, error)
            return
        self._socket.setblocking(False)
        code = self._socket.connect_ex((address, self._port))
        if code in _CONNECTING:
            selector.register(self._socket, selectors.EVENT_WRITE, self._on_connected)
        else:
            self._refused(code)

    def give_up(self) -> Greeting:
        """Return the result for an endpoint that has not finished the handshake at the deadline."""
        if self._has_greeted:
            return self._greeting(
                GreetingStatus.SILENT,
                tr(
                    "answered the first request as an RPC worker, but no further request within {timeout_s:g} s; "
                    "restart the worker",
                    timeout_s=self._timeout_s,
                ),
            )
        if self._connected and self._tunnelled:
            return self._greeting(
                GreetingStatus.TIMED_OUT,
                tr(
                    "did not answer within {timeout_s:g} s through the tunnel; check the other computer and the "
                    "network, or start this program again",
                    timeout_s=self._timeout_s,
                ),
            )
        if self._connected and self._received:
            return self._greeting(
                GreetingStatus.NOT_RPC,
                tr("sent only a part of an answer; check that an RPC worker runs there"),
            )
        if self._connected:
            return self._greeting(
                GreetingStatus.BUSY,
                tr(
                    "accepted the connection but did not answer within {timeout_s:g} s: an RPC worker serves one "
                    "program at a time, so end the program that uses the worker",
                    timeout_s=self._timeout_s,
                ),
            )
        return self._greeting(
            GreetingStatus.TIMED_OUT,
            tr(
                "did not answer within {timeout_s:g} s; check the address, the network and its firewall",
                timeout_s=self._timeout_s,
            ),
        )

    def _on_connected(self, selector: selectors.BaseSelector) -> None:
        assert self._socket is not None
        # Writable means that connecting has ended; SO_ERROR says how.
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code != 0:
            selector.unregister(self._socket)
            self._refused(code)
            return
        self._connected = True
        if self._send(selector):
            selector.modify(self._socket, selectors.EVENT_READ, self._on_readable)

    def _send(self, selector: selectors.BaseSelector) -> bool:
        """Send the next request; return False if the connection is broken.

        This does not block: the server has answered all earlier requests, so the socket's send buffer is empty.
        """
        assert self._socket is not None
        try:
            self._socket.send(self._request)
        except OSError:
            selector.unregister(self._socket)
            self._closed()
            return False
        return True

    def _on_readable(self, selector: selectors.BaseSelector) -> None:
        assert self._socket is not None
        try:
            # Never more than the expected answer: whatever else a server sends stays unread.
            part = self._socket.recv(_HEADER.size + self._answer_bytes - len(self._received))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self._received += part
        if self._tunnelled and self._received.startswith(NOTICE):
            # Our tunnel could not reach the other end, and says why before it closes.
            if part:
                self._answer_bytes = MAX_NOTICE_BYTES
            else:
                self._end(*read_notice(self._received))
        elif not part:
            self._closed()
        # An answer begins with its length, which the engine's client would trust.
        elif len(self._received) >= _HEADER.size and _HEADER.unpack_from(self._received)[0] != self._answer_bytes:
            self._end(GreetingStatus.NOT_RPC, tr("sent an answer that is not that of an RPC worker; check the port"))
        elif len(self._received) == _HEADER.size + self._answer_bytes and self._go_on():
            self._send(selector)
            return
        if self.result is not None:
            selector.unregister(self._socket)

    def _go_on(self) -> bool:
        """Check the answer and prepare the next request; return False if the handshake has ended."""
        answer, self._received = self._received[_HEADER.size :], b""
        try:
            self._request, self._answer_bytes = self._questions.send(answer)
        except StopIteration as end:
            self._end(*end.value)
            return False
        return True

    def _closed(self) -> None:
        when = tr("after the first answer") if self._has_greeted else tr("without an answer")
        if self._tunnelled:
            text = tr("closed the tunnel {when}; check the worker there, then try again", when=when)
            self._end(GreetingStatus.NOT_RPC, text)
            return
        self._end(
            GreetingStatus.NOT_RPC,
            tr(
                "closed the connection {when}: the program there is not an RPC worker, or has another version; "
                "check the port, and run the same release on both computers",
                when=when,
            ),
        )

    def _refused(self, code: int) -> None:
        if self._tunnelled:
            self._end(
                GreetingStatus.REFUSED, tr("cannot be reached: the tunnel ended on this computer; add the device again")
            )
        elif code in (errno.ECONNREFUSED, getattr(errno, "WSAECONNREFUSED", errno.ECONNREFUSED)):
            self._end(GreetingStatus.REFUSED, tr("refused the connection: nothing listens there; start the RPC worker"))
        else:
            self._end(
                GreetingStatus.REFUSED,
                tr("cannot be reached ({strerror}); check the address and the network", strerror=os.strerror(code)),
            )

    def _end(self, status: GreetingStatus, words: str) -> None:
        self.result = self._greeting(status, words)

    def _greeting(self, status: GreetingStatus, words: str) -> Greeting:
        # Some of the texts end with a question.
        sentence = f"{words}." if status is GreetingStatus.UNRESOLVED else f"{self.endpoint} {words}."
        return Greeting(self.endpoint, status, sentence.replace("?.", "?"), self._version)


def make_notice(status: GreetingStatus, words: str) -> bytes:
    """Return the message that a tunnel sends to its client if it cannot reach the server at the other end.

    `status`: the status that the client's handshake ends with.
    `words`: the reason; it completes a sentence that begins with the endpoint.
    """
    return NOTICE + f"{status.value} {words}".encode()[:MAX_NOTICE_BYTES]


def read_notice(data: bytes) -> tuple[GreetingStatus, str]:
    """Return status and reason from a notice (a tunnel's message that it cannot reach its server, see `make_notice`).

    The reason completes a sentence that begins with the endpoint.
    """
    name, _, words = data.removeprefix(NOTICE).decode("utf-8", "replace").partition(" ")
    # OK is not accepted from a notice: it stands in the place of an answer.
    known = {status.value: status for status in GreetingStatus if status is not GreetingStatus.OK}
    return known.get(name, GreetingStatus.NOT_RPC), show(words)


def _unasked(endpoint: str, error: OSError) -> Greeting:
    words = tr(
        "was not contacted, because this computer could not open a connection ({strerror}); close other programs and "
        "try again",
        strerror=error.strerror or error,
    )
    return Greeting(endpoint, GreetingStatus.REFUSED, f"{endpoint} {words}.")


def _unpaired(endpoint: str) -> Greeting:
    words = tr(
        "is reached through a tunnel, but is not paired with this computer; pair with it (Devices > Find Computers "
        "Nearby)"
    )
    return Greeting(endpoint, GreetingStatus.UNTRUSTED, f"{endpoint} {words}.")


def _request(command: int, payload: bytes = b"") -> bytes:
    # A byte for the command, then the length of the payload (rpc_cmd in ggml-rpc.cpp).
    return struct.pack("<BQ", command, len(payload)) + payload


def _absurd(claim: str, wanted: str) -> _Verdict:
    words = tr(
        "reports {claim}, which is invalid (expected: {wanted}); check that an RPC worker runs there",
        claim=claim,
        wanted=wanted,
    )
    return GreetingStatus.ABSURD, words
