"""Child processes that connect to other machines: one tunnel for each paired machine, and the search in the network.

A tunnel is started when it is first needed, and ends with this process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from engine.base.errors import EngineError, WorkerStalledError
from engine.base.programs import child_argv
from engine.base.values import replace
from engine.devices.device import Device, Rig
from engine.devices.endpoint import parse_lent_endpoint
from engine.machines.tunnel.door import require_guard
from engine.machines.tunnel.pairings import PairingStore
from engine.runtime.process.child import ChildProcess
from engine.runtime.process.outcome import EndReason, ProcessOutcome
from engine.runtime.protocol.messages import Failure, Message
from engine.runtime.protocol.network import (
    Browse,
    NearbyMachine,
    NearbyMachines,
    OpenTunnel,
    TunnelFailed,
    TunnelMessage,
    TunnelOpened,
)

_QUIT_NEARBY_S = 0.2
_END_S = 5.0
START_TIMEOUT_S = 30.0
MAX_RESTARTS = 3
_HOST = "127.0.0.1"
_QUIT_S = 0.5
_LOOK_S = 1.0
"""Seconds between two readings of the file of pairings while there are tunnels."""
_log = logging.getLogger("layerdeck.engine")


class _Tunnel:
    """A child process that forwards connections to one machine, with a local port for each requested device.

    If it ends by itself, it is started again with the same ports, three times at most.
    """

    def __init__(self, request: OpenTunnel) -> None:
        self._request = request
        self._condition = threading.Condition()
        # By the device's name there; None until the child tells it.
        self._ports: dict[str, int | None] = {}
        self._problems: dict[str, str] = {}
        """Why a device has no port, by its name there; until it is asked for again."""
        self._problem = ""
        """Why the child has ended or must end; empty while it runs."""
        self._closed = False
        self._restarts_left = MAX_RESTARTS
        self._child = self._make()

    def start(self) -> None:
        with self._condition:
            self._begin(self._child)

    def ask(self, device: str) -> None:
        """Request a local port for `device` from the child process, only once for each device."""
        with self._condition:
            if device not in self._ports:
                self._ports[device] = None
                self._problems.pop(device, None)
                self._child.send(replace(self._request, device=device))

    def wait_until_open(self, device: str, deadline_s: float) -> str:
        """Wait for the port of `device` and return its local address (host:port).

        Raises:
            EngineError: if the tunnel does not open before `deadline_s` (monotonic clock).
        """
        with self._condition:
            self._condition.wait_for(
                lambda: bool(self._ports.get(device) or self._problems.get(device) or self._problem),
                max(0.0, deadline_s - time.monotonic()),
            )
            if problem := self._problem or self._problems.get(device):
                raise EngineError(problem)
            port = self._ports.get(device)
            if port is None:
                raise WorkerStalledError("The tunnel did not open in time; close other programs and try again.")
            return f"{_HOST}:{port}"

    @property
    def is_open(self) -> bool:
        with self._condition:
            return not self._problem and not self._closed

    @property
    def has_ended(self) -> bool:
        return self._child.outcome is not None

    def close(self) -> None:
        with self._condition:
            self._closed = True
            child = self._child
        child.stop(quit_s=_QUIT_S)

    def wait_for_end(self, timeout_s: float) -> None:
        self._child.wait(timeout_s)

    def _make(self) -> ChildProcess:
        child = ChildProcess(
            self._take,
            self._take_end,
            argv=child_argv("tunnel"),
            name="tunnel",
            about=self._request.endpoint,
            messages=TunnelMessage,
        )
        # A tunnel is silent while nothing passes, so silence is no sign of a hang.
        child.watch(False)
        return child

    def _begin(self, child: ChildProcess) -> None:
        child.start()
        for device, port in self._ports.items():
            child.send(replace(self._request, device=device, port=port or 0))

    def _take(self, message: Message) -> None:
        with self._condition:
            if isinstance(message, TunnelOpened):
                self._ports[message.device] = message.port
            elif isinstance(message, TunnelFailed):
                self._ports.pop(message.device, None)
                self._problems[message.device] = message.message
            elif isinstance(message, Failure):
                # A request that the child cannot read: nothing more is sent to it.
                self._problem = message.message
                self._child.stop(quit_s=_QUIT_S)
            self._condition.notify_all()

    def _take_end(self, outcome: ProcessOutcome) -> None:
        with self._condition:
            # A tunnel that never opened would fail again for the same reason.
            was_open = any(port is not None for port in self._ports.values())
            may_restart = was_open and self._restarts_left > 0 and not self._problem
            if self._closed or not may_restart:
                self._problem = self._problem or f"The tunnel ended. {outcome.sentence}"
                self._condition.notify_all()
                return
            self._restarts_left -= 1
            # On the same ports: plans and loaded models have the local addresses of this tunnel.
            child = self._child = self._make()
            _log.warning("the tunnel to %s is started again: %s", self._request.endpoint, outcome.sentence)
            # Still under the lock: who closes meanwhile must find a child that it can end.
            self._begin(child)


class Tunnels:
    """The tunnels of this process by endpoint and fingerprint of the machine. Thread-safe.

    A tunnel is a child process that forwards a local port to a paired machine (`Forwarder`). It is started at the first
    request. It runs until `close`, or until the pairing is deleted, by this or another process. Endpoints may name a
    device of the machine (`parse_lent_endpoint`); the devices of one machine share its child.

    `identity`: file with the key and certificate of this machine.
    `book`: the file of pairings.
    """

    def __init__(self, identity: Path, book: PairingStore) -> None:
        self._identity = identity
        self._book = book
        self._lock = threading.Lock()
        self._tunnels: dict[tuple[str, str], _Tunnel] = {}
        self._ending: list[_Tunnel] = []
        """Tunnels that are not used any more, whose children may still run."""
        self._closing = threading.Event()
        self._watching: threading.Thread | None = None

    def __enter__(self) -> Tunnels:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reach(self, rig: Rig) -> Rig:
        """Open tunnels for the devices of paired machines; return `rig` with the tunnels' local addresses.

        The address is the field `via` of a device. Starting a tunnel blocks for a moment. A device of a machine that is
        not paired gets no tunnel.

        Raises:
            EngineError: if a tunnel does not open.
        """
        vias = self._open({(device.endpoint, device.fingerprint) for device in rig.devices})
        return Rig(tuple(_with_via(device, vias) for device in rig.devices), rig.host)

    def route(self, endpoint: str, fingerprint: str) -> str:
        """Return the local address (host:port) of the tunnel to a machine; empty if the machine is not paired.

        A missing tunnel is started, which blocks for a moment.

        `endpoint`: address of the machine's listener (host:port), perhaps with the name of a device.
        `fingerprint`: fingerprint of the machine's certificate.

        Raises:
            EngineError: if the tunnel does not open.
        """
        return self._open([(endpoint, fingerprint)]).get((endpoint, fingerprint), "")

    def close(self) -> None:
        """Stop all tunnels, and wait a bounded time for their end.

        May be called in every state and any number of times.
        """
        with self._lock:
            self._closing.set()
            tunnels = (*self._tunnels.values(), *self._ending)
        # All are told to stop before any is waited for, so that the waits overlap.
        for tunnel in tunnels:
            tunnel.close()
        deadline_s = time.monotonic() + _END_S
        for tunnel in tunnels:
            tunnel.wait_for_end(max(0.0, deadline_s - time.monotonic()))
        if self._watching is not None:
            self._watching.join(max(0.0, deadline_s - time.monotonic()))

    def _open(self, wanted: Iterable[tuple[str | None, str | None]]) -> dict[tuple[str, str], str]:
        opened = {}
        for endpoint, fingerprint in wanted:
            if endpoint is None or fingerprint is None:
                continue
            address, device = parse_lent_endpoint(endpoint)
            tunnel = self._tunnel(address, fingerprint)
            if tunnel is not None:
                tunnel.ask(device)
                opened[endpoint, fingerprint] = tunnel, device
        # One deadline for all: they were started first, and open in parallel.
        deadline_s = time.monotonic() + START_TIMEOUT_S
        return {key: tunnel.wait_until_open(device, deadline_s) for key, (tunnel, device) in opened.items()}

    def _tunnel(self, endpoint: str, fingerprint: str) -> _Tunnel | None:
        pairing = self._book.find("server", fingerprint)
        if pairing is None:
            return None
        # From the look-up to the start: two threads must not open two tunnels to one machine.
        require_guard()
        with self._lock:
            if self._closing.is_set():
                raise EngineError("The program is ending.")
            known = self._tunnels.get((endpoint, fingerprint))
            if known is not None:
                if known.is_open:
                    return known
                self._end([(endpoint, fingerprint)])
            request = OpenTunnel(endpoint=endpoint, certificate=pairing.certificate, identity=str(self._identity))
            tunnel = _Tunnel(request)
            self._tunnels[endpoint, fingerprint] = tunnel
            tunnel.start()
            if self._watching is None:
                self._watching = threading.Thread(target=self._end_forgotten, name="tunnels", daemon=True)
                self._watching.start()
            return tunnel

    def _end_forgotten(self) -> None:
        """End tunnels to machines whose pairing was deleted. Runs in a thread of its own until `close` is called."""
        while not self._closing.wait(_LOOK_S):
            with self._lock:
                fingerprints = {fingerprint for _, fingerprint in self._tunnels}
            if not fingerprints:
                continue
            # Also another process may delete a pairing, so only the file tells.
            forgotten = self._book.forgotten("server", fingerprints)
            with self._lock:
                self._end([key for key in self._tunnels if key[1] in forgotten])

    def _end(self, keys: Iterable[tuple[str, str]]) -> None:
        """Ask tunnels to stop, without waiting for their child processes (`close` waits). The caller holds the lock.

        `keys`: (endpoint, fingerprint) of the machine of each tunnel.
        """
        self._ending = [tunnel for tunnel in self._ending if not tunnel.has_ended]
        for key in keys:
            tunnel = self._tunnels.pop(key)
            tunnel.close()
            self._ending.append(tunnel)


def _with_via(device: Device, vias: dict[tuple[str, str], str]) -> Device:
    if device.endpoint is None or device.fingerprint is None:
        return device
    return replace(device, via=vias.get((device.endpoint, device.fingerprint)))


class NearbySearch:
    """The search for machines that announce themselves in the local network. A child process does the search.

    The callbacks run in a thread that reads the messages of the child.

    `on_found`: called with all announced machines, after each change.
    `on_problem`: called with a sentence if the search fails.
    `interfaces`: addresses of the network interfaces, empty for all.
    """

    def __init__(
        self,
        on_found: Callable[[tuple[NearbyMachine, ...]], None],
        on_problem: Callable[[str], None],
        *,
        interfaces: Sequence[str] = (),
    ) -> None:
        self._on_found, self._on_problem = on_found, on_problem
        self._request = Browse(interfaces=tuple(interfaces))
        self._child = ChildProcess(
            self._take, self._take_end, argv=child_argv("tunnel"), name="nearby", messages=TunnelMessage
        )
        # While the network does not change, the child is silent; that is no sign of a hang.
        self._child.watch(False)
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Start the search. Called once; does nothing after `close`."""
        with self._lock:
            if not self._closed:
                self._child.start()
                self._child.send(self._request)

    def close(self) -> None:
        """Stop the search, and wait a bounded time for the end of the child.

        May be called in every state, in any thread and any number of times.
        """
        with self._lock:
            self._closed = True
        self._child.stop(quit_s=_QUIT_NEARBY_S)
        self._child.wait(_END_S)

    def _take(self, message: Message) -> None:
        if isinstance(message, NearbyMachines):
            self._on_found(message.machines)
        elif isinstance(message, Failure):
            self._on_problem(message.message)

    def _take_end(self, outcome: ProcessOutcome) -> None:
        # STOPPED is our own `close`.
        if outcome.reason is not EndReason.STOPPED:
            self._on_problem(f"The search in the network ended. {outcome.sentence}")
