"""One open model, as everybody uses it: window, command line, tests."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from engine.devices.device import Device
from engine.devices.holder import MemoryHolder
from engine.runtime.probing.probe import ProbeCache
from engine.runtime.process.child import DEFAULT_STALL_TIMEOUT_S
from engine.runtime.protocol.messages import AnyModelRequest
from engine.runtime.session import inputs
from engine.runtime.session.driver import PROPOSAL_LIMIT_S, Driver, DriverOptions, Receiver, Workshop, nobody
from engine.runtime.session.events import RequestEnding, RequestEvent
from engine.runtime.session.load_order import LoadOrder
from engine.runtime.session.snapshot import Snapshot
from engine.runtime.session.state import STOP_TIMEOUT_S


class RequestStream:
    """Events of one request in their order, the ending last. `number`: the request's number. For one thread."""

    def __init__(self, session: ModelSession, number: int, events: queue.SimpleQueue[RequestEvent]) -> None:
        self._session, self.number, self._events = session, number, events

    def __iter__(self) -> Iterator[RequestEvent]:
        """Wait for each event; after the ending there is no other."""
        while True:
            event = self._events.get()
            yield event
            if isinstance(event, RequestEnding):
                return

    def next(self, timeout_s: float) -> RequestEvent:
        """Return the next event; to be called no more after the ending.

        Raises:
            queue.Empty: none came in time.
        """
        return self._events.get(timeout=timeout_s)

    @property
    def is_empty(self) -> bool:
        """Whether no event waits to be read."""
        return self._events.empty()

    def stop(self) -> None:
        """Ask for the end of the request; its ending comes as always."""
        self._session.stop(self.number)


class ModelSession:
    """Loads a model into a child, asks it, and ends it. Thread-safe; no call but `close` waits.

    `receiver` gets every event but those of a `stream`, every new snapshot, and readings of device memory, in the
    session's thread, snapshots before the events that led to them; it should return soon. A load gets exactly one
    ending, however many layouts were tried for it, and so does a request. A loaded model that is lost while nothing is
    asked of it is told by one more `Crashed` or `Failed`. `holders` tells, in a thread of ours, who holds a device's
    memory when a load has run out of it. `sequences`: the folder in which the child may save sequences and read them,
    made where it is missing; without one it saves none.
    """

    def __init__(
        self,
        receiver: Receiver,
        *,
        holders: Callable[[Device], tuple[MemoryHolder, ...]] = nobody,
        cache: ProbeCache | None = None,
        stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        proposal_limit_s: float = PROPOSAL_LIMIT_S,
        argv: Sequence[str] | None = None,
        sequences: Path | None = None,
    ) -> None:
        workshop = Workshop(cache if cache is not None else ProbeCache(), holders, proposal_limit_s, argv, sequences)
        self._driver = Driver(receiver, workshop, DriverOptions(stall_timeout_s, stop_timeout_s, argv))

    @property
    def snapshot(self) -> Snapshot:
        """How it stands now; what was called before is in it."""
        return self._driver.snapshot

    def load(self, order: LoadOrder) -> None:
        """Load `order`, or what its retries allow. Ends with one of `Loaded, OutOfMemory, Failed, Crashed, Cancelled`.

        Nothing runs: begins; what is loaded stays until a layout has been checked, the workers that it does not hold
        have answered, and it is loaded for real. Else what runs is stopped and gets its ending, then this begins; of
        several that wait the last does, the others are `Cancelled`.

        Raises:
            ArgumentError: after `close`.
        """
        self._driver.take(inputs.Load(order))

    def ask(self, request: AnyModelRequest) -> int:
        """Ask the loaded model, also while it answers others; return the number that its events will carry.

        A generation: `Reading`s, `Token`s, then one of `Done, OutOfMemory, Failed, Crashed`. All else ends with
        `Answered` instead of `Done`, or with `Cancelled` where it was stopped.

        Raises:
            ArgumentError: where no model is ready, with a sentence; then there is no event.
        """
        return self._driver.ask(request)

    def stream(self, request: AnyModelRequest) -> RequestStream:
        """Ask as `ask` does; the events of this request go to the stream, and not to the receiver.

        Any number of streams may be open at once, each read by a thread of its own.
        """
        events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        return RequestStream(self, self._driver.ask(request, events), events)

    def stop(self, request: int | None = None) -> None:
        """End one request; without one the load, the load that waits, and every request.

        A load ends with `Cancelled`, or with its proposals as they are where it was being explained. A generation ends
        with `Done` (`stopped`), the model stays; where nothing but what is to stop is under way, a child that does not
        stop in time is ended, with `Failed`. Nothing there, or asked again: nothing.
        """
        self._driver.take(inputs.StopAll() if request is None else inputs.StopRequest(request))

    def unload(self) -> None:
        """End all that runs as `stop` does, then free the loaded model."""
        self._driver.take(inputs.Unload())

    def query_device_memory(self) -> None:
        """Ask for the live memory of the loaded model's devices: the receiver gets it. Nothing loaded: nothing."""
        self._driver.take(inputs.QueryMemory())

    def close(self) -> None:
        """End everything, wait for it a bounded time; what runs gets its ending. A second call only waits."""
        self._driver.close()
