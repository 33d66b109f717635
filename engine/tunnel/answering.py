"""The serving end of the tunnel: a TLS listener that lets paired machines through to one RPC worker of this one."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import EngineError
from engine.tunnel.calling import Admission
from engine.tunnel.channel import (
    BrokenTalkError,
    Channel,
    Purpose,
    keep_alive,
    read_preface,
    serving_context,
    shut,
    tls_of,
)
from engine.tunnel.codes import OpenCode
from engine.tunnel.fingerprints import fingerprint_of
from engine.tunnel.identity import Identity
from engine.tunnel.pairing import answer_pairing
from engine.tunnel.pairings import Pairing, PairingBook
from engine.tunnel.relay import relay

MAX_CONNECTIONS = 32
MAX_OF_ONE_ADDRESS = 8
HELLO_S = 5.0
"""For preface and handshake of a session."""
PAIRING_S = 15.0
BUSY_S = 0.8
"""A caller waits so long for the session before it, which may just be ending."""
_BACKLOG = 16
_LOOK_S = 0.5
_END_S = 3.0
_log = logging.getLogger("layerdeck.engine")


@dataclass(eq=False, slots=True)
class _Caller:
    """One connection. `fingerprint` is known in a session only."""

    connection: socket.socket
    address: str
    fingerprint: str = ""


class Listener:
    """Listens from the start of its context to its end.

    `reach_worker` returns a connection to the worker, or raises `OSError`; `on_paired` is called in a thread. Callers
    beyond the limits are closed at once; who is no paired machine has some seconds. A pairing that is forgotten ends
    the session that uses it.

    Raises, on entering:
        EngineError: where it cannot listen.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        identity: Identity,
        book: PairingBook,
        code: OpenCode,
        name: str,
        reach_worker: Callable[[], socket.socket],
        on_paired: Callable[[Pairing], None],
    ) -> None:
        self._address = (host, port)
        self._identity, self._book, self._code, self._name = identity, book, code, name
        self._reach_worker = reach_worker
        self._on_paired = on_paired
        self._lock = threading.Lock()
        self._callers: set[_Caller] = set()
        self._threads: set[threading.Thread] = set()
        self._session = threading.Lock()
        self._closed = threading.Event()
        self._listening: socket.socket | None = None
        self._accepting = threading.Thread(target=self._accept, name="tunnel-accept", daemon=True)

    def __enter__(self) -> Listener:
        host, port = self._address
        try:
            self._listening = socket.create_server(self._address, backlog=_BACKLOG)
        except (OSError, OverflowError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise EngineError(
                f"Cannot listen on {host}:{port}: {reason}. Choose another port or a numeric address of this machine."
            ) from None
        self._listening.settimeout(_LOOK_S)
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._accepting.join(_END_S)
        if self._listening is not None:
            self._listening.close()
        with self._lock:
            callers, threads = tuple(self._callers), tuple(self._threads)
        for caller in callers:
            shut(caller.connection)
        deadline_s = time.monotonic() + _END_S
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    @property
    def port(self) -> int:
        """The port that it listens on, also where any was asked for."""
        assert self._listening is not None
        return int(self._listening.getsockname()[1])

    def _accept(self) -> None:
        assert self._listening is not None
        looked_s = time.monotonic()
        while not self._closed.is_set():
            if time.monotonic() - looked_s >= _LOOK_S:
                self._end_forgotten()
                looked_s = time.monotonic()
            try:
                connection, (address, _) = self._listening.accept()
            except TimeoutError:
                continue
            except OSError as error:  # no descriptors left, or a caller that was gone at once
                _log.warning("tunnel: a caller was not taken: %s", error)
                self._closed.wait(_LOOK_S)
                continue
            self._take(_Caller(connection, address))

    def _take(self, caller: _Caller) -> None:
        with self._lock:
            of_address = Counter(each.address for each in self._callers)[caller.address]
            if len(self._callers) >= MAX_CONNECTIONS or of_address >= MAX_OF_ONE_ADDRESS:
                caller.connection.close()
                return
            self._callers.add(caller)
            thread = threading.Thread(target=self._serve, args=(caller,), name="tunnel-caller", daemon=True)
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # the system gives us no more threads
            self._leave(caller, thread)

    def _leave(self, caller: _Caller, thread: threading.Thread) -> None:
        with self._lock:
            self._callers.discard(caller)
            self._threads.discard(thread)
        caller.connection.close()

    def _serve(self, caller: _Caller) -> None:
        try:
            self._talk(caller)
        except (OSError, BrokenTalkError, EngineError) as error:
            _log.info("tunnel: a caller from %s was left: %s", caller.address, error)
        except Exception:
            _log.exception("tunnel: a caller could not be served")
        finally:
            self._leave(caller, threading.current_thread())

    def _talk(self, caller: _Caller) -> None:
        begin_s = time.monotonic()
        purpose = read_preface(caller.connection, begin_s + HELLO_S)
        if purpose is None:
            return
        keep_alive(caller.connection)
        if purpose is Purpose.PAIRING:
            channel, _ = self._greet(caller, serving_context(self._identity, None), begin_s + PAIRING_S)
            pairing = answer_pairing(channel, self._identity, self._name, self._code)
            if pairing is not None:
                self._book.add(pairing)
                self._on_paired(pairing)
            return
        clients = {each.fingerprint: each for each in self._book.all("client")}
        context = serving_context(self._identity, [each.der for each in clients.values()])
        channel, certificate = self._greet(caller, context, begin_s + HELLO_S)
        client = clients.get(fingerprint_of(certificate))
        if client is not None:
            caller.fingerprint = client.fingerprint
            self._serve_session(channel, client)

    def _greet(self, caller: _Caller, context: ssl.SSLContext, deadline_s: float) -> tuple[Channel, bytes]:
        tls = tls_of(caller.connection, context, server_side=True)
        with self._lock:
            caller.connection = tls
        channel = Channel(tls, deadline_s)
        return channel, channel.handshake()

    def _serve_session(self, channel: Channel, client: Pairing) -> None:
        if not self._session.acquire(timeout=BUSY_S):
            channel.send(Admission.BUSY.value.encode())
            return
        try:
            try:
                worker = self._reach_worker()
            except OSError:
                channel.send(Admission.NO_WORKER.value.encode())
                return
            try:
                channel.send(Admission.OPEN.value.encode())
                relay(channel.tls, worker)
            finally:
                worker.close()
        finally:
            self._session.release()

    def _end_forgotten(self) -> None:
        with self._lock:
            in_session = [each for each in self._callers if each.fingerprint]
        if not in_session:
            return
        known = {each.fingerprint for each in self._book.all("client")}
        for caller in in_session:
            if caller.fingerprint not in known:
                shut(caller.connection)
