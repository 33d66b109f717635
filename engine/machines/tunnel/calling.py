"""The client's end of the tunnel: pairs with a machine, or forwards local connections to a paired machine's workers.

Failures of a call become a `TunnelError` with a sentence for people.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TypeVar

from engine.base.texts import show
from engine.devices.endpoint import GreetingStatus, make_notice, parse_endpoint
from engine.machines.tunnel.door import is_our_user
from engine.machines.tunnel.identity import Identity
from engine.machines.tunnel.offers import (
    CALL_TIMEOUT_S,
    MAX_OFFERED,
    MAX_REFUSED_S,
    STRANGER,
    Admission,
    ClientRequest,
    Entrance,
    Offer,
    OfferedDevice,
    OfferHeader,
    TunnelError,
    bounded,
)
from engine.machines.tunnel.pairing import ask_pairing, read_code
from engine.machines.tunnel.pairings import MAX_NAME, Pairing, PairingError
from engine.machines.tunnel.streams import (
    BrokenTalkError,
    ClosedTalkError,
    Purpose,
    Stream,
    calling_context,
    keep_alive,
    plain_stream,
    relay,
    tls_stream,
)

PAIRING_TIMEOUT_S = 15.0
MAX_FORWARDED = 8
"""Largest number of local connections that are forwarded at the same time."""
_HOST = "127.0.0.1"
_LINGER_S = 1.0
_PAUSE_S = 0.2
_log = logging.getLogger("layerdeck.engine")
_Answer = TypeVar("_Answer", Entrance, OfferHeader)
CHANGED = (
    "shows another certificate than when it was paired: it was set up again, or another computer answers in its place. "
    "If it was set up again, forget it and pair with it again"
)
NOT_SECURE = "does not answer as a secure worker does; check the port, and that it lends its devices"


_REFUSALS = {
    Admission.BUSY: (
        GreetingStatus.BUSY,
        "serves another program now, and a worker serves one at a time; end the program that uses it",
    ),
    Admission.NO_WORKER: (GreetingStatus.REFUSED, "answers, but its RPC worker does not run; start it again there"),
    Admission.UNKNOWN: (
        GreetingStatus.REFUSED,
        "is not lent there (any more); lend it on that computer, or remove the device here",
    ),
}


async def open_session(
    endpoint: str, certificate: bytes, identity: Identity, timeout_s: float = CALL_TIMEOUT_S, device: str = ""
) -> Stream:
    """Return a stream to a worker of the machine that has this `certificate` (DER).

    `endpoint`: address of the machine's listener (host:port).
    `device`: id of the device on that machine. Empty: its first device (older releases have only one).

    Raises:
        TunnelError: the call failed. It is raised within `timeout_s` seconds, and has the reason.
    """
    stream: Stream | None = None
    try:
        async with _calling(endpoint, timeout_s):
            if device:
                stream = await _call(endpoint, Purpose.ASK, identity, certificate)
                entrance = await _request(endpoint, stream, ClientRequest(device), Entrance)
            else:
                stream = await _call(endpoint, Purpose.SESSION, identity, certificate)
                entrance = Entrance(await _read_admission(endpoint, stream))
            if entrance.admission is not Admission.OPEN:
                raise _refusal(endpoint, entrance)
    except BaseException:
        if stream is not None:
            stream.abort()  # A close would wait seconds longer for an answer of the other side.
        raise
    return stream


def ask_offer(endpoint: str, certificate: bytes, identity: Identity, timeout_s: float = CALL_TIMEOUT_S) -> Offer:
    """Return the offer of a machine: the devices that it lends.

    It runs an event loop, so it must be called in a thread without one.

    `certificate`: certificate (DER) that the machine must show.

    Raises:
        TunnelError: the call failed. It is raised within `timeout_s` seconds, and has the reason. The status `NOT_RPC`
            can mean an older release, which does not know this request and lends a single device without a name.
    """
    return asyncio.run(_ask_offer(endpoint, certificate, identity, timeout_s))


async def _ask_offer(endpoint: str, certificate: bytes, identity: Identity, timeout_s: float) -> Offer:
    stream: Stream | None = None
    try:
        async with _calling(endpoint, timeout_s):
            stream = await _call(endpoint, Purpose.ASK, identity, certificate)
            header = await _request(endpoint, stream, ClientRequest(), OfferHeader)
            if not 0 <= header.count <= MAX_OFFERED:
                raise BrokenTalkError(f"it lends {header.count} devices")
            offered = [await stream.receive_message(OfferedDevice) for _ in range(header.count)]
    finally:
        if stream is not None:
            stream.abort()  # Everything was read.
    devices = {each.name: each for each in map(bounded, offered) if each is not None}
    return Offer(show(" ".join(header.name.split()), MAX_NAME) or "unnamed", tuple(devices.values()))


async def _request(endpoint: str, stream: Stream, request: ClientRequest, kind: type[_Answer]) -> _Answer:
    with _first_answer(endpoint):
        await stream.send_message(request)
        return await stream.receive_message(kind)


@contextmanager
def _first_answer(endpoint: str) -> Iterator[None]:
    """Context manager for the first messages after the TLS handshake.

    Raises `TunnelError` if the connection ends within the block, because a server that does not know this machine
    closes it at that time.

    `endpoint`: address of the called machine, for the error.
    """
    try:
        yield
    # In TLS 1.3 a client has finished its handshake before the server looks at its certificate. A server that does not
    # admit the certificate closes then: asyncio's sends no alert.
    except (ConnectionError, ssl.SSLError, ClosedTalkError):
        raise TunnelError(endpoint, GreetingStatus.UNTRUSTED, STRANGER) from None
    except TimeoutError:
        raise
    except OSError as error:  # The network is gone, which says nothing about the pairing.
        raise _unreached(endpoint, error) from None


def _refusal(endpoint: str, entrance: Entrance) -> TunnelError:
    # Our own name as that of the user would send people looking for a second computer. After a break of the network the
    # other end holds the session until the system there gives the connection up.
    if entrance.admission is Admission.BUSY and entrance.is_yours:
        words = "still holds a session of this computer; try again in some seconds, or end what uses it here"
        return TunnelError(endpoint, GreetingStatus.BUSY, words)
    if entrance.admission is Admission.BUSY and (user := show(" ".join(entrance.user.split()), MAX_NAME)):
        words = f"is used by {user} now; wait until it is free, or use another device of that computer"
        return TunnelError(endpoint, GreetingStatus.BUSY, words)
    if entrance.admission is Admission.NO_WORKER and entrance.refused_s > 0:
        minutes = math.ceil(min(entrance.refused_s, MAX_REFUSED_S) / 60)
        words = (
            f"refuses this computer for {minutes} min, because models from this computer keep crashing its RPC "
            "worker; then load another model, or give that device no layers"
        )
        return TunnelError(endpoint, GreetingStatus.REFUSED, words)
    return TunnelError(endpoint, *_REFUSALS[entrance.admission])


async def _read_admission(endpoint: str, stream: Stream) -> Admission:
    with _first_answer(endpoint):
        first = await stream.receive(1)
    try:
        return Admission(first.decode("ascii", "replace"))
    except ValueError:
        raise BrokenTalkError("it sent an unknown admission byte") from None


def pair_with(endpoint: str, code: str, identity: Identity, name: str, timeout_s: float = PAIRING_TIMEOUT_S) -> Pairing:
    """Pair with the machine at `endpoint` (host:port) that shows `code`; return the pairing, which the caller stores.

    Blocks for at most `timeout_s` seconds. It runs an event loop, so it must be called in a thread without one.

    `name`: name of this machine in the other machine's list.

    Raises:
        TunnelError: if the machine cannot be called.
        PairingError: if the two machines do not pair.
        ValueError: with a sentence, if `endpoint` is not an address host:port, or `code` cannot be a pairing code.
    """
    # Checked before anything is sent: a code that cannot be right would cost one of three tries.
    read_code(code)
    parse_endpoint(endpoint)
    return asyncio.run(_pair(endpoint, code, identity, name, timeout_s))


async def _pair(endpoint: str, code: str, identity: Identity, name: str, timeout_s: float) -> Pairing:
    async with _calling(endpoint, timeout_s):
        stream = await _call(endpoint, Purpose.PAIRING, identity, None)
        try:
            return await ask_pairing(stream, identity, name, code, endpoint)
        except PairingError as error:
            raise PairingError(f"{endpoint} {error.summary()}.") from None
        finally:
            await stream.close()


async def _call(endpoint: str, purpose: Purpose, identity: Identity, certificate: bytes | None) -> Stream:
    """Connect to a machine, send the preface, do the TLS handshake, and return the stream.

    `purpose`: what the connection is for, which the preface (the bytes before TLS) states.
    `certificate`: certificate (DER) that the machine must show, None for any.
    """
    loop = asyncio.get_running_loop()
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # IPv4 alone, as in ggml's RPC client: the same endpoint must mean the same machine to both.
        connection.setblocking(False)
        try:
            host, port = parse_endpoint(endpoint)
            found = await loop.getaddrinfo(host, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
            await loop.sock_connect(connection, found[0][4])
        except (OSError, UnicodeError) as error:
            raise _unreached(endpoint, error) from None
        # Before TLS: the listener closes a connection that does not begin with a preface, without a handshake.
        keep_alive(connection)
        await loop.sock_sendall(connection, purpose.value.encode())
        return await tls_stream(connection, calling_context(identity, certificate))
    # A time-out cancels this task, and CancelledError is a BaseException. No stream owns the socket yet.
    except BaseException:
        connection.close()
        raise


@asynccontextmanager
async def _calling(endpoint: str, timeout_s: float) -> AsyncIterator[None]:
    """Context manager that limits the time of a call, and raises its errors as `TunnelError` with a sentence.

    `endpoint`: address of the called machine, for the error.
    `timeout_s`: time-out of the whole context in seconds.
    """
    try:
        async with asyncio.timeout(timeout_s):
            yield
    # The order of the clauses matters: TimeoutError and SSLCertVerificationError are OSErrors.
    except TimeoutError:
        words = f"did not answer within {timeout_s:g} s; check the address, the network and its firewall"
        raise TunnelError(endpoint, GreetingStatus.TIMED_OUT, words) from None
    except ssl.SSLCertVerificationError:
        raise TunnelError(endpoint, GreetingStatus.UNTRUSTED, CHANGED) from None
    except (OSError, BrokenTalkError):
        raise TunnelError(endpoint, GreetingStatus.NOT_RPC, NOT_SECURE) from None


def _unreached(endpoint: str, error: Exception) -> TunnelError:
    if isinstance(error, ConnectionRefusedError):
        words = "refused the connection: nothing is lent there; start Devices > Lend This Computer or `rig serve` there"
        return TunnelError(endpoint, GreetingStatus.REFUSED, words)
    if isinstance(error, socket.gaierror | UnicodeError):
        return TunnelError(endpoint, GreetingStatus.UNRESOLVED, "has no IPv4 address; check the name")
    reason = getattr(error, "strerror", None) or error
    words = f"cannot be reached ({reason}); check the address and the network"
    return TunnelError(endpoint, GreetingStatus.REFUSED, words)


class Forwarder:
    """A local port that forwards connections to one paired machine, or to one of its devices.

    Only processes of this user may connect to it. It listens from the constructor on; `run` forwards connections until
    it is cancelled.

    `port`: local port, 0 for any free one.
    `device`: id of the device on that machine, empty for its first one.
    """

    def __init__(self, endpoint: str, certificate: bytes, identity: Identity, port: int = 0, device: str = "") -> None:
        self._endpoint, self._certificate, self._identity = endpoint, certificate, identity
        self._device = device
        # Listens before the event loop runs: the parent is told the port at once, and early callers wait in the
        # backlog.
        self._listening = socket.create_server((_HOST, port), backlog=MAX_FORWARDED)

    @property
    def port(self) -> int:
        """The local port, which the system chose if port 0 was requested."""
        return int(self._listening.getsockname()[1])

    async def run(self) -> None:
        """Forward connections until the task is cancelled."""
        loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        self._listening.setblocking(False)
        with self._listening:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listening)
                except OSError:  # no descriptors left, or a caller that was gone at once
                    await asyncio.sleep(_PAUSE_S)
                    continue
                try:
                    # A local port is open to every user of this computer, and the tunnel would authenticate them as us.
                    is_ours = len(tasks) < MAX_FORWARDED and is_our_user(connection)
                except OSError:  # The caller is gone already, or there are no descriptors left.
                    is_ours = False
                if not is_ours:
                    connection.close()
                    continue
                # The loop holds tasks by weak references only. This set keeps them, and its size is the number of
                # connections.
                task = asyncio.create_task(self._serve(connection))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            # Each token takes several small RPC messages, which Nagle's algorithm could hold back.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller = await plain_stream(connection)
            try:
                await self._forward(caller)
            finally:
                await caller.close()
        except (OSError, BrokenTalkError) as error:
            _log.info("tunnel: a caller has gone: %s", error)
        finally:
            connection.close()

    async def _forward(self, caller: Stream) -> None:
        try:
            session = await open_session(self._endpoint, self._certificate, self._identity, device=self._device)
        except TunnelError as error:
            await _refuse(caller, make_notice(error.status, error.words))
            return
        await relay(session, caller)


async def _refuse(caller: Stream, notice: bytes) -> None:
    """Send `notice`, the reason of a refusal, and wait until the caller has closed its end of the connection.

    If this side closed first, the caller could lose the notice.
    """
    await caller.send(notice)
    # Half of a close: the caller sees the end of the notice, and its own direction stays open until it closes.
    caller.transport.write_eof()
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            await caller.wait_for_end()
