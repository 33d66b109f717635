"""Serves a device of this machine through the tunnel: a worker that only the listener can reach, and that listener."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from engine.machines.rigs.lab import KeptWeights, serve
from engine.machines.tunnel.door import Key
from engine.machines.tunnel.identity import Identity
from engine.machines.tunnel.listener import Listener
from engine.machines.tunnel.pairing import OpenCode
from engine.machines.tunnel.pairings import Pairing, PairingStore
from engine.runtime.protocol.messages import Serving

NOT_GUARDED = "This system cannot keep other users of this computer from the worker; they can use it without pairing."


@dataclass(frozen=True, slots=True)
class SecureAddress:
    """Address and port for paired machines, and the name under which they list this one."""

    host: str
    port: int
    name: str
    identity: Identity
    book: PairingStore
    code: OpenCode


def serve_secure(
    address: SecureAddress,
    *,
    device: str,
    cap_bytes: int | None,
    kept: KeptWeights | None,
    until: threading.Event,
    on_serving: Callable[[Serving], None],
    on_paired: Callable[[Pairing], None],
) -> None:
    """Serve `device` to paired machines until `until` is set. Worker and listener have ended when this returns or
    raises.

    `on_serving` is called with the worker's message, which has the listener's port.

    Raises:
        EngineError: if it cannot listen or serve, or if the worker ended by itself.
    """
    # The listener starts before the worker, because its port names the worker's cache folder. Until the worker serves,
    # callers are told that there is none.
    reach: list[Callable[[], socket.socket]] = []

    def reach_worker() -> socket.socket:
        if not reach:
            raise ConnectionRefusedError
        return reach[0]()

    # The key outlives the worker: while it is held, no other user can bind the port that the worker trusts.
    with Key() as key:
        listener = Listener(
            address.host,
            address.port,
            identity=address.identity,
            book=address.book,
            code=address.code,
            name=address.name,
            reach_worker=reach_worker,
            on_paired=on_paired,
        )
        with listener:

            def begin(serving: Serving) -> None:
                reach.append(partial(key.connect, serving.port))
                on_serving(msgspec.structs.replace(serving, port=listener.port))

            serve(
                # Any free port of the loopback interface: only `begin` has to know it.
                port=0,
                device=device,
                cap_bytes=cap_bytes,
                kept=kept,
                kept_name=str(listener.port),
                until=until,
                on_serving=begin,
                client_port=key.port,
            )
