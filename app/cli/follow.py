"""Runs a model session (load and requests) for a command of the command line.

The main thread reads the session's events. An interrupt (Ctrl+C) stops the load or the answers.
"""

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
from engine.runtime.protocol.messages import FinalMessage
from engine.runtime.protocol.requests import AnyModelRequest
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
    Saving,
    Shifted,
    Stage,
    Token,
)
from engine.runtime.session.load_spec import LoadSpec
from engine.runtime.session.session import ModelSession, RequestStream
from engine.runtime.session.snapshot import Snapshot
from engine.runtime.session.status import Phase

# Seconds of one wait.
# Python runs signal handlers in the main thread only, and on Windows an endless wait delays them.
INTERRUPT_POLL_S = 0.2
# Limit of a wait in which a person may think for hours. Elsewhere a signal handler ends the wait by an event.
IDLE_POLL_S = INTERRUPT_POLL_S if os.name == "nt" else None
LONG_S = 2.0
"""Seconds after which the user is told of a request that holds up the command."""
# Seconds to wait for the reason of a loss, which may need answers of RPC workers.
_LOSS_S = 30.0

BadEnding = OutOfMemory | Failed | Crashed | Cancelled


class Ended(Exception):
    """Raised to end the command. `ending`: the last event, which determines the exit code."""

    def __init__(self, ending: BadEnding) -> None:
        super().__init__(str(ending))
        self.ending = ending


class Follower:
    """Runs a `ModelSession` for a command.

    The session reports in its own thread; the main thread reads its events from a queue. A signal handler only counts
    interrupts, and the loops of the main thread act on the count. `sequences`: folder of saved KV states; None: KV
    states are neither saved nor restored.
    """

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
    def loading(self, spec: LoadSpec) -> Iterator[None]:
        """Context manager: the session loads the plan of `spec`, and interrupts such as Ctrl+C are counted.

        When the block has been left, all child processes have ended.
        """
        with on_interrupt(self._interrupt):
            try:
                self.session.load(spec)
                yield
            finally:
                self.session.close()

    def _interrupt(self) -> None:
        # Called between two bytecodes of the main thread: the loops below act on the count.
        self._interrupts += 1
        self.wake()

    @property
    def interrupted(self) -> bool:
        """Whether an interrupt (such as Ctrl+C) has come that is not handled yet (`mark_interrupt_handled`)."""
        return self._interrupts > self._heeded

    def mark_interrupt_handled(self) -> None:
        """Mark the first unhandled interrupt as handled.

        Called at the end of an answer, because the interrupt may have stopped this answer. If a second interrupt came
        before the end of the answer, it stays unhandled and ends the command.
        """
        self._heeded = min(self._heeded + 1, self._interrupts)

    @property
    def cancelled(self) -> Cancelled:
        """The event that ends an interrupted command. It names the stage that the load of the model had reached."""
        return Cancelled(stage=self._stage)

    @property
    def loaded_plan(self) -> Plan | None:
        """The plan of the loaded model; None if no model is loaded.

        After a step back (the requested layout did not fit), this is the plan of the layout that was loaded instead.
        """
        loaded = self.session.snapshot.loaded
        return None if loaded is None else loaded.spec.plan

    # ------------------------------------------------------------------ news of the session

    def load(self, printer: Printer | None) -> LoadEnding:
        """Wait for the end of the load, and return its last event, which is not printed.

        After an interrupt the last event is `Cancelled`. `printer`: prints the progress; None prints nothing.
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
        """Yield the updates of the session as they arrive. The iterator never ends.

        An interrupt stops the load or the requests that are running, and unloads the model. A second interrupt closes
        the session, which kills the child if it does not exit in time.
        """
        handled = 0
        while True:
            handled = self._handle_interrupts(handled, self.session.unload)
            with suppress(queue.Empty):
                yield self._news.get(timeout=INTERRUPT_POLL_S)

    def check(self) -> None:
        """Raise an error if the model was lost while no request was running, or after an interrupt.

        Raises:
            Ended: the model has crashed or run out of memory, or an interrupt came. `ending` is the event of this.
        """
        if self.interrupted:
            raise Ended(self.cancelled)
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, OutOfMemory | Failed | Crashed):
                raise Ended(news)

    def step_back(self, spec: LoadSpec, ending: LoadEnding | RequestEnding) -> bool:
        """Load another layout if an answer ran out of memory and no model is loaded any more.

        Return whether such a load was started; the caller then calls `load`. After an interrupt, or if `spec` allows
        no retries, no load is started.
        `spec`: the `LoadSpec` of the plan that was loaded. `ending`: the last event of the answer.
        """
        is_lost = isinstance(ending, OutOfMemory) and self.session.snapshot.loaded is None
        if not is_lost or not spec.retry.retries or self.interrupted:
            return False
        self.session.load(spec)
        return True

    # ------------------------------------------------------------------ requests

    def ask(self, request: AnyModelRequest) -> RequestStream:
        """Send a request to the loaded model, and return the stream of its events.

        Raises:
            Ended: the model has just crashed or run out of memory, or an interrupt came. `ending` is the event of this.
        """
        try:
            return self.session.stream(request)
        except ArgumentError as error:
            if self.interrupted:
                raise Ended(self.cancelled) from None
            # The child was lost a moment ago. The event with the reason is in the queue, or follows.
            deadline_s = time.monotonic() + _LOSS_S
            while time.monotonic() < deadline_s:
                with suppress(queue.Empty):
                    news = self._news.get(timeout=INTERRUPT_POLL_S)
                    if isinstance(news, OutOfMemory | Failed | Crashed):
                        raise Ended(news) from None
            raise Ended(Failed(kind=error.kind, message=error.summary())) from None

    def events(self, stream: RequestStream, *, stop: Callable[[], None] | None) -> Iterator[RequestEvent]:
        """Yield the events of a request, up to and including the last one. `stream`: result of `ask`.

        `stop`: function to call at the first interrupt; a second interrupt closes the session. If `stop` is None,
        interrupts are ignored.
        """
        handled = 0
        while True:
            if stop is not None:
                handled = self._handle_interrupts(handled, stop)
            with suppress(queue.Empty):
                event = stream.next(INTERRUPT_POLL_S)
                yield event
                if isinstance(event, RequestEnding):
                    return

    def _handle_interrupts(self, handled: int, stop: Callable[[], None]) -> int:
        """Call `stop` at the first unhandled interrupt, and close the session at the second one.

        Return the number of interrupts so far, without those of earlier answers. Pass it as `handled` to the next call,
        so that no action is repeated.

        After `stop` the engine still finishes the batch that it is computing. Closing the session kills the child if it
        does not exit in time.

        Raises:
            Ended: at a third interrupt, because a killed process may take minutes to exit, until its memory is free.
        """
        interrupts = self._interrupts - self._heeded
        if interrupts > 2 and handled > 1:
            raise Ended(self.cancelled)
        if interrupts > 1 and handled < 2:
            self.session.close()
        elif interrupts == 1 and not handled:
            stop()
        return interrupts

    def answer_of(
        self, request: AnyModelRequest, *, stops: bool = True, on_long: Callable[[], None] | None = None
    ) -> FinalMessage | BadEnding:
        """Send a request that generates no text, and return its answer, or the event of its failure.

        `stops`: whether an interrupt stops the request and unloads the model.
        `on_long`: called once if the request takes longer than `LONG_S`. After that, an interrupt stops the request.

        Raises:
            Ended: the model has just crashed or run out of memory, or an interrupt came. `ending` is the event of this.
        """
        begun_s, stream = time.monotonic(), self.ask(request)
        warned_at: int | None = None
        ending: RequestEvent | None = None
        for event in self.events(stream, stop=self.session.unload if stops else None):
            ending = event
            if warned_at is not None and self._interrupts > warned_at:
                stream.stop()
            elif warned_at is None and on_long is not None and time.monotonic() - begun_s >= LONG_S:
                warned_at = self._interrupts
                on_long()
        assert ending is not None
        assert not isinstance(ending, Done | Token | Shifted | Reading | Saving)
        return ending.answer if isinstance(ending, Answered) else ending


def _nothing() -> None:
    """Do nothing; the default of `Follower.wake`."""


def exit_code_of(ending: LoadEnding | RequestEnding) -> int:
    """Return the exit code of a command whose last event is `ending`."""
    match ending:
        case OutOfMemory():
            return exit_codes.DOES_NOT_FIT
        case Cancelled():
            return exit_codes.INTERRUPTED
        case Failed() | Crashed():
            return exit_codes.exit_code(ending.kind)
    return exit_codes.OK
