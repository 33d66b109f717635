"""One open model: window, command line and tests use a `ModelSession` to load it, send it requests, and unload it.

A load: `ModelSession.load` passes the load spec to the state machine (`machine.py`, `loads.py`), which returns effects
(actions for the driver). The driver (`driver.py`) prepares the request. If other layouts may be tried, it first probes
the layout (loads it without memory). It then checks whether the RPC workers answer, ends the child of the previous
model, and starts a child with the request. The child reports the stages and finally `LoadedModel`, with the bytes
measured in each buffer type. `loads.py` turns this message into `Loaded`, whose rows the load report shows next to the
forecast.

A request: `ModelSession.ask` gives it a number and sends it to the child. `answers.py` turns the child's messages into
events with this number: `Reading` while the prompt is computed, `Token` for each piece of the answer, and one final
event. `Reading` and `Token` also state how much of the context is in use.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from engine.devices.device import Device
from engine.devices.telemetry.sample import MemoryHolder
from engine.runtime.probing.probe import ProbeCache
from engine.runtime.process.child import DEFAULT_STALL_LIMIT_S
from engine.runtime.protocol.requests import AnyModelRequest
from engine.runtime.session import inputs
from engine.runtime.session.driver import (
    PROPOSAL_LIMIT_S,
    Driver,
    DriverOptions,
    Receiver,
    WorkRunner,
    no_holders,
    nothing_to_flush,
)
from engine.runtime.session.events import RequestEnding, RequestEvent
from engine.runtime.session.load_spec import LoadSpec
from engine.runtime.session.snapshot import Snapshot
from engine.runtime.session.state import STOP_TIMEOUT_S


class RequestStream:
    """The events of one request in their order, up to its final event. Use a stream in one thread only.

    `number`: number of the request, which its events carry.
    """

    def __init__(self, session: ModelSession, number: int, events: queue.SimpleQueue[RequestEvent]) -> None:
        self._session, self.number, self._events = session, number, events

    def __iter__(self) -> Iterator[RequestEvent]:
        """Yield each event as soon as it arrives, up to and including the final event of the request."""
        while True:
            event = self._events.get()
            yield event
            if isinstance(event, RequestEnding):
                return

    def next(self, timeout_s: float) -> RequestEvent:
        """Wait for the next event and return it. After the final event a further call only times out.

        Raises:
            queue.Empty: no event came within `timeout_s`.
        """
        return self._events.get(timeout=timeout_s)

    @property
    def is_empty(self) -> bool:
        """Whether all events that have arrived were read."""
        return self._events.empty()

    def stop(self) -> None:
        """Ask the child to end the request. The final event of the request still arrives."""
        self._session.stop(self.number)


class ModelSession:
    """Loads a model into a child process, sends it requests, and ends it. Thread-safe; only `close` waits.

    Each load and each request ends with exactly one event, even if several layouts were tried for a load. If the child
    is lost while no load and no request runs, one more `Crashed` or `Failed` reports the loss.

    `receiver`: called in the session's thread with each new snapshot, with each event (except those of requests that
    have a receiver or `stream` of their own), and with readings of device memory and each `ComputingNeed`. A snapshot
    comes before the events of the same change. The call should return soon: the child's messages wait meanwhile.
    `holders`: returns the processes that hold a device's memory; called in a worker thread after a load ran out of
    memory.
    `flush`: called in the session's thread when `receiver` has the snapshot and all events of one change.
    `sequences`: folder in which the child may save and restore KV states; created if missing. None: it is not allowed.
    `argv`: command line that starts the child process; None: the usual one.
    """

    def __init__(
        self,
        receiver: Receiver,
        *,
        flush: Callable[[], None] = nothing_to_flush,
        holders: Callable[[Device], tuple[MemoryHolder, ...]] = no_holders,
        cache: ProbeCache | None = None,
        stall_limit_s: float = DEFAULT_STALL_LIMIT_S,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        proposal_limit_s: float = PROPOSAL_LIMIT_S,
        argv: Sequence[str] | None = None,
        sequences: Path | None = None,
    ) -> None:
        runner = WorkRunner(cache if cache is not None else ProbeCache(), holders, proposal_limit_s, argv, sequences)
        self._driver = Driver(receiver, runner, DriverOptions(stall_limit_s, stop_timeout_s, argv, flush))

    @property
    def snapshot(self) -> Snapshot:
        """The current state of the session. It includes the effects of all method calls that have returned."""
        return self._driver.snapshot

    def load(self, spec: LoadSpec) -> None:
        """Load the plan of `spec`. The load ends with one of `Loaded, OutOfMemory, Failed, Crashed, Cancelled`.

        A running load or running requests are stopped first. If several loads wait, the last one begins and the others
        end with `Cancelled`. The previous model is unloaded after the new layout was checked and its RPC workers have
        answered.

        Raises:
            ArgumentError: after `close`.
        """
        self._driver.take(inputs.Load(spec))

    def ask(self, request: AnyModelRequest, receiver: Callable[[RequestEvent], None] | None = None) -> int:
        """Send a request to the loaded model, and return the number that its events will carry.

        Other requests may be running. `receiver`: gets the events instead of the session's receiver. It is called in
        the session's thread and must return soon; the ending is the last event.

        Events of a `Generate`: `Reading`s, `Token`s, then one of `Done, OutOfMemory, Failed, Crashed`. Other requests
        end with `Answered` instead of `Done`, or with `Cancelled` if stopped.

        Raises:
            ArgumentError: no model is ready. There is no event then.
        """
        return self._driver.ask(request, receiver)

    def stream(self, request: AnyModelRequest) -> RequestStream:
        """Send a request to the loaded model. Its events go to the returned stream instead of the session's receiver.

        Any number of streams may be open at once, each read by its own thread.

        Raises:
            ArgumentError: no model is ready.
        """
        # Unbounded, as the events of a request are: the session's thread must not wait for a slow reader.
        events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        return RequestStream(self, self._driver.ask(request, events.put), events)

    def stop(self, request: int | None = None) -> None:
        """Stop one request. If `request` is None, stop the load, the waiting load, and every request.

        This method does not wait. A load ends with `Cancelled`; if it had run out of memory, it ends with `OutOfMemory`
        and the proposals found so far. A generation ends with `Done` and stop reason `stopped`, after the operation
        that is being computed; the model stays loaded. Does nothing if nothing runs.
        """
        self._driver.take(inputs.StopAll() if request is None else inputs.StopRequest(request))

    def unload(self) -> None:
        """Stop the load and every request, then end the child, which frees the model."""
        self._driver.take(inputs.Unload())

    def query_device_memory(self) -> None:
        """Request the free memory of the loaded model's devices; the receiver gets the answer.

        Does nothing if no model is loaded.
        """
        self._driver.take(inputs.QueryMemory())

    def close(self) -> None:
        """Stop everything, refuse later calls, and wait a bounded time until the child has ended.

        A second call only waits."""
        self._driver.close()
