"""Calling another machine: for a session with its worker, or to pair with it. What goes wrong becomes a sentence."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

from engine.devices.endpoint import GreetingStatus, parse_endpoint
from engine.errors import EngineError
from engine.tunnel.channel import BrokenTalkError, Channel, Purpose, calling_context, keep_alive, tls_of
from engine.tunnel.codes import read_code
from engine.tunnel.identity import Identity
from engine.tunnel.pairing import ask_pairing
from engine.tunnel.pairings import Pairing, PairingError

CALL_TIMEOUT_S = 1.7
"""Connection, handshake and the other side's first word: a greeting through a tunnel has 2 s for all of it."""
PAIRING_TIMEOUT_S = 15.0
_Result = TypeVar("_Result")
CHANGED = (
    "shows another certificate than when it was paired: it was set up anew, or another machine answers in its place. "
    "If it was set up anew, forget it and pair with it again"
)
STRANGER = "does not know this computer (any more); forget it and pair with it again"
NOT_SECURE = "does not answer as a secure worker does; check the port, and that it runs `rig serve --secure`"


class Admission(StrEnum):
    """The server's first byte of a session."""

    OPEN = "O"
    BUSY = "B"
    NO_WORKER = "W"


_REFUSALS = {
    Admission.BUSY: (
        GreetingStatus.BUSY,
        "serves another program now, and a worker serves one at a time; end the program that uses it",
    ),
    Admission.NO_WORKER: (GreetingStatus.REFUSED, "answers, but its RPC worker does not run; start it again there"),
}


class TunnelError(EngineError):
    """A machine that could not be called; `words` follow its name in the sentence."""

    kind = "unreachable"

    def __init__(self, endpoint: str, status: GreetingStatus, words: str) -> None:
        super().__init__(f"{endpoint} {words}.")
        self.endpoint = endpoint
        self.status = status
        self.words = words


def open_session(
    endpoint: str, certificate: bytes, identity: Identity, timeout_s: float = CALL_TIMEOUT_S
) -> ssl.SSLSocket:
    """Return a connection to the worker of the machine that holds `certificate`.

    Raises:
        TunnelError: with the reason, within `timeout_s`.
    """

    def admit(channel: Channel, _certificate: bytes) -> ssl.SSLSocket:
        try:
            admission = Admission(channel.receive(1).decode("ascii", "replace"))
        except ValueError:
            raise BrokenTalkError("it began with another word") from None
        if admission is not Admission.OPEN:
            raise TunnelError(endpoint, *_REFUSALS[admission])
        return channel.tls

    return _call(endpoint, Purpose.SESSION, identity, certificate, timeout_s, admit)


def pair_with(endpoint: str, code: str, identity: Identity, name: str, timeout_s: float = PAIRING_TIMEOUT_S) -> Pairing:
    """Return the pairing with the machine at `endpoint` that shows `code`, to be kept; `name` is what it calls us.

    Raises:
        TunnelError: where it cannot be called.
        PairingError: where the exchange fails.
        ValueError: with a sentence, for a text that is no endpoint or no code.
    """

    read_code(code)

    def exchange(channel: Channel, certificate: bytes) -> Pairing:
        try:
            return ask_pairing(channel, certificate, identity, name, code, endpoint)
        except PairingError as error:
            raise PairingError(f"{endpoint} {error.summary()}.") from None
        finally:
            channel.close()

    return _call(endpoint, Purpose.PAIRING, identity, None, timeout_s, exchange)


def _call(
    endpoint: str,
    purpose: Purpose,
    identity: Identity,
    certificate: bytes | None,
    timeout_s: float,
    then: Callable[[Channel, bytes], _Result],
) -> _Result:
    """Connect, shake hands and go on with `then`; the connection stays open only where that returns."""
    deadline_s = time.monotonic() + timeout_s
    try:
        connection = socket.create_connection(parse_endpoint(endpoint), timeout=timeout_s)
    except (OSError, UnicodeError) as error:
        raise _unreached(endpoint, error, timeout_s) from None
    channel: Channel | None = None
    try:
        keep_alive(connection)
        connection.sendall(purpose.value.encode())
        context = calling_context(identity, certificate)
        channel = Channel(tls_of(connection, context), deadline_s)
        return then(channel, channel.handshake())
    except BaseException as error:
        if channel is None:
            connection.close()
        else:
            channel.close()
        if isinstance(error, OSError | BrokenTalkError):
            raise _broken(endpoint, error, timeout_s) from None
        raise


def _unreached(endpoint: str, error: Exception, timeout_s: float) -> TunnelError:
    if isinstance(error, TimeoutError):
        return _silent(endpoint, timeout_s)
    if isinstance(error, ConnectionRefusedError):
        words = "refused the connection: nothing listens there; start `rig serve --secure` there"
        return TunnelError(endpoint, GreetingStatus.REFUSED, words)
    if isinstance(error, socket.gaierror | UnicodeError):
        return TunnelError(endpoint, GreetingStatus.UNRESOLVED, "has no IPv4 address; check the name")
    reason = getattr(error, "strerror", None) or error
    words = f"cannot be reached ({reason}); check the address and the network"
    return TunnelError(endpoint, GreetingStatus.REFUSED, words)


def _broken(endpoint: str, error: Exception, timeout_s: float) -> TunnelError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return TunnelError(endpoint, GreetingStatus.UNTRUSTED, CHANGED)
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        return TunnelError(endpoint, GreetingStatus.UNTRUSTED, STRANGER)
    if isinstance(error, TimeoutError):
        return _silent(endpoint, timeout_s)
    return TunnelError(endpoint, GreetingStatus.NOT_RPC, NOT_SECURE)


def _silent(endpoint: str, timeout_s: float) -> TunnelError:
    words = f"did not answer within {timeout_s:g} s; check the address, the network and its firewall"
    return TunnelError(endpoint, GreetingStatus.TIMED_OUT, words)
