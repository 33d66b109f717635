"""The session of a command. The main thread reads its events until the command ends; interrupts stop it."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from app.cli import exit_codes
from app.cli.entry import on_interrupt
from app.cli.inputs import learn_need
from app.cli.printers import Printer
from engine.base.errors import ArgumentError
from engine.devices.device import ComputingNeed
from engine.devices.telemetry.memory_holders import memory_holders
from engine.planning.plan.plan import Plan
from engine.runtime.protocol.messages import AnyModelRequest, FinalMessage
from engine.runtime.session.driver import SessionUpdate
from engine.runtime.session.events import (
    Answered,
    Attempt,
    Cancelled,
    Crashed,
    Done,
    Failed,
    Fallback,
    LoadEnding,
    OutOfMemory,
    Progress,
    Reading,
    RequestEnding,
    RequestEvent,
    Shifted,
    Stage,
    Token,
)
from engine.runtime.session.load_order import LoadOrder
from engine.runtime.session.session import ModelSession, RequestStream
from engine.runtime.session.snapshot import Snapshot
from engine.runtime.session.status import Phase

# Seconds of one wait.
# Python runs signal handlers in the main thread only, and on Windows an endless wait delays them.
INTERRUPT_POLL_S = 0.2
# Limit of a wait in which a person may think for hours. Elsewhere a signal handler ends the wait by an event.
IDLE_POLL_S = INTERRUPT_POLL_S if os.name == "nt" else None
# Seconds to wait for the reason of a loss, which may need answers of RPC workers.
_LOSS_S = 30.0

BadEnding = OutOfMemory | Failed | Crashed | Cancelled


class Ended(Exception):
    """Raised to end the command. It holds the last event."""

    def __init__(self, ending: BadEnding) -> None:
        super().__init__(str(ending))
        self.ending = ending


class Follower:
    """A session and its events. `sequences`: folder of saved KV states, None for none."""

    def __init__(self, sequences: Path | None = None) -> None:
        self._news: queue.SimpleQueue[SessionUpdate] = queue.SimpleQueue()
        self.session = ModelSession(self._receive, holders=memory_holders, sequences=sequences)
        self._stage: Stage = "header"
        self._interrupts = 0
        self._heeded = 0
        # Called after news and interrupts, in any thread and in a signal handler: it ends a wait for something else.
        self.wake: Callable[[], None] = _nothing

    def _receive(self, news: SessionUpdate) -> None:
        # In the session's thread: it is saved before the ending that it belongs to is shown.
        if isinstance(news, ComputingNeed):
            learn_need(news)
        else:
            self._news.put(news)
            self.wake()

    @contextmanager
    def loading(self, order: LoadOrder) -> Iterator[None]:
        """Context with a session that loads `order`. It handles interrupts, and ends all child processes."""
        with on_interrupt(self._interrupt):
            try:
                self.session.load(order)
                yield
            finally:
                self.session.close()

    def _interrupt(self) -> None:
        # Called between two bytecodes of the main thread: the loops below act on the count.
        self._interrupts += 1
        self.wake()

    @property
    def interrupted(self) -> bool:
        """Whether there was an interrupt that has not been handled."""
        return self._interrupts > self._heeded

    def heed(self) -> None:
        """Mark the interrupts so far as handled, because their answer has ended."""
        self._heeded = self._interrupts

    @property
    def cancelled(self) -> Cancelled:
        """The last event of an interrupted command."""
        return Cancelled(stage=self._stage)

    @property
    def loaded_plan(self) -> Plan | None:
        """The loaded plan, which may differ from the order after a step back; None if the model was lost."""
        loaded = self.session.snapshot.loaded
        return None if loaded is None else loaded.order.plan

    # ------------------------------------------------------------------ news of the session

    def load(self, printer: Printer | None) -> LoadEnding:
        """Show the progress of the load, and return its last event, which is not shown.

        After an interrupt it is `Cancelled`.
        """
        for news in self.news():
            if isinstance(news, Progress):
                self._stage = news.stage
            if isinstance(news, LoadEnding):
                # The last thing that was asked for was to stop, whatever came of the load meanwhile.
                return self.cancelled if self.interrupted else news
            if printer is None:
                continue
            if isinstance(news, Snapshot) and news.phase is Phase.LOADING:
                printer.child_started()
            elif isinstance(news, Progress | Attempt | Fallback):
                printer.show(news)
        raise AssertionError("news have no end")

    def news(self) -> Iterator[SessionUpdate]:
        """Wait for the next event without a time-out. An interrupt stops what runs."""
        stopping = False
        while True:
            if self.interrupted and not stopping:
                # Once is enough: if the child does not stop in time, the session kills it.
                stopping = True
                self.session.stop()
            with suppress(queue.Empty):
                yield self._news.get(timeout=INTERRUPT_POLL_S)

    def check(self) -> None:
        """Check whether the model was lost while no request runs.

        Raises:
            Ended: if it was lost, or after an interrupt.
        """
        if self.interrupted:
            raise Ended(self.cancelled)
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, OutOfMemory | Failed | Crashed):
                raise Ended(news)

    def step_back(self, order: LoadOrder, ending: LoadEnding | RequestEnding) -> bool:
        """Load another layout after memory ran out in an answer, if the order allows it; return whether it was begun.

        The caller follows with `load`. `order`: of the plan that was loaded.
        """
        is_lost = isinstance(ending, OutOfMemory) and self.session.snapshot.loaded is None
        if not is_lost or not order.retry.retries or self.interrupted:
            return False
        self.session.load(order)
        return True

    # ------------------------------------------------------------------ requests

    def ask(self, request: AnyModelRequest) -> RequestStream:
        """Send a request to the loaded model.

        Raises:
            Ended: if the model was just lost, with the event that names the reason.
        """
        try:
            return self.session.stream(request)
        except ArgumentError as error:
            # The child was lost a moment ago. The event with the reason is in the queue, or follows.
            deadline_s = time.monotonic() + _LOSS_S
            while time.monotonic() < deadline_s:
                with suppress(queue.Empty):
                    news = self._news.get(timeout=INTERRUPT_POLL_S)
                    if isinstance(news, OutOfMemory | Failed | Crashed):
                        raise Ended(news) from None
            raise Ended(Failed(kind=error.kind, message=error.summary())) from None

    def events(self, stream: RequestStream, *, stops: bool = True) -> Iterator[RequestEvent]:
        """Yield the events of a request. An interrupt stops the request if `stops` is set."""
        while True:
            if self.interrupted and stops:
                stops = False
                stream.stop()
            with suppress(queue.Empty):
                event = stream.next(INTERRUPT_POLL_S)
                yield event
                if isinstance(event, RequestEnding):
                    return

    def answer_of(self, request: AnyModelRequest, *, stops: bool = True) -> FinalMessage | BadEnding:
        """Return the child's last message on a request that generates nothing, or the event of its failure.

        Raises:
            Ended: as `ask`.
        """
        *_, ending = self.events(self.ask(request), stops=stops)
        assert not isinstance(ending, Done | Token | Shifted | Reading)
        return ending.answer if isinstance(ending, Answered) else ending


def _nothing() -> None:
    """Do nothing."""


def exit_code_of(ending: LoadEnding | RequestEnding) -> int:
    """Return the exit code of a command that ends with this event."""
    match ending:
        case OutOfMemory():
            return exit_codes.DOES_NOT_FIT
        case Cancelled():
            return exit_codes.INTERRUPTED
        case Failed() | Crashed():
            return exit_codes.exit_code(ending.kind)
    return exit_codes.OK
