"""The calling end of the tunnel: a port of this machine, for our own processes, that leads to one paired machine."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from engine.devices.endpoint import make_notice
from engine.tunnel.calling import TunnelError, open_session
from engine.tunnel.door import is_our_user
from engine.tunnel.identity import Identity
from engine.tunnel.relay import relay

MAX_CONNECTIONS = 8
_HOST = "127.0.0.1"
_LINGER_S = 1.0
_PAUSE_S = 0.2


class Forwarder:
    """Listens from the start on; `run` passes connections on, for ever. Each has a thread; there are few at once."""

    def __init__(self, endpoint: str, certificate: bytes, identity: Identity, port: int = 0) -> None:
        self._endpoint, self._certificate, self._identity = endpoint, certificate, identity
        self._places = threading.Semaphore(MAX_CONNECTIONS)
        self._listening = socket.create_server((_HOST, port), backlog=MAX_CONNECTIONS)

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    def run(self) -> None:
        """Pass on whatever comes, until the process ends."""
        while True:
            try:
                caller, _ = self._listening.accept()
            except OSError:  # no descriptors left, or a caller that was gone at once
                time.sleep(_PAUSE_S)
                continue
            if not self._places.acquire(blocking=False):
                caller.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(caller,), name="forward", daemon=True).start()
            except RuntimeError:  # the system gives us no more threads
                caller.close()
                self._places.release()

    def _serve(self, caller: socket.socket) -> None:
        try:
            with caller:
                if is_our_user(caller):
                    self._forward(caller)
        except OSError:
            pass  # The caller is gone.
        finally:
            self._places.release()

    def _forward(self, caller: socket.socket) -> None:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            tls = open_session(self._endpoint, self._certificate, self._identity)
        except TunnelError as error:
            _refuse(caller, make_notice(error.status, error.words))
            return
        with tls:
            relay(tls, caller)


def _refuse(caller: socket.socket, notice: bytes) -> None:
    """Say why, and close once the caller has it: closing before it has would throw the words away."""
    caller.sendall(notice)
    caller.shutdown(socket.SHUT_WR)
    caller.settimeout(_LINGER_S)
    with suppress(OSError):
        while caller.recv(1 << 16):
            pass
