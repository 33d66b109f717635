"""One session of a command: its news are read in the main thread until the command is over. Interrupts stop it."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from app.cli import exit_codes
from app.cli.entry import on_interrupt
from app.cli.printers import Printer
from engine.base.errors import ArgumentError
from engine.devices.telemetry.memory_holders import memory_holders
from engine.planning.plan.plan import Plan
from engine.runtime.protocol.messages import AnyModelRequest, LastWord
from engine.runtime.session.driver import News
from engine.runtime.session.events import (
    Answered,
    Attempt,
    Cancelled,
    Crashed,
    Done,
    Failed,
    LoadEnding,
    OutOfMemory,
    Progress,
    Reading,
    RequestEnding,
    RequestEvent,
    Stage,
    Token,
)
from engine.runtime.session.load_order import LoadOrder
from engine.runtime.session.session import ModelSession, RequestStream
from engine.runtime.session.snapshot import Snapshot
from engine.runtime.session.status import Phase

INTERRUPT_POLL_S = 0.2
"""Python runs signal handlers in the main thread only: a wait without limit would hold them up on Windows."""
_LOSS_S = 30.0
"""How long to wait for the reason of a loss, which may ask the workers of other machines."""

BadEnding = OutOfMemory | Failed | Crashed | Cancelled


class Ended(Exception):
    """The command is over, with this event as its last one."""

    def __init__(self, ending: BadEnding) -> None:
        super().__init__(str(ending))
        self.ending = ending


class Follower:
    """A session and its news. `sequences`: the folder of saved states, None for none."""

    def __init__(self, sequences: Path | None = None) -> None:
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self.session = ModelSession(self._news.put, holders=memory_holders, sequences=sequences)
        self._stage: Stage = "header"
        self._interrupts = 0
        self._heeded = 0

    @contextmanager
    def loading(self, order: LoadOrder) -> Iterator[None]:
        """Load `order` and see to interrupts; no process of ours is left after the block."""
        with on_interrupt(self._interrupt):
            try:
                self.session.load(order)
                yield
            finally:
                self.session.close()

    def _interrupt(self) -> None:
        self._interrupts += 1

    @property
    def interrupted(self) -> bool:
        """Whether somebody wants an end, and has not got one."""
        return self._interrupts > self._heeded

    def heed(self) -> None:
        """Take the interrupts so far as answered: they were about an answer that has ended."""
        self._heeded = self._interrupts

    @property
    def cancelled(self) -> Cancelled:
        """The ending of a command that was interrupted."""
        return Cancelled(stage=self._stage)

    @property
    def loaded_plan(self) -> Plan | None:
        """The plan that is loaded, which may have stepped back from the order; None if the model was lost."""
        loaded = self.session.snapshot.loaded
        return None if loaded is None else loaded.order.plan

    # ------------------------------------------------------------------ news of the session

    def load(self, printer: Printer | None) -> LoadEnding:
        """Show how the load goes; return its ending, which is not shown. After an interrupt that is `Cancelled`."""
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
            elif isinstance(news, Progress | Attempt):
                printer.show(news)
        raise AssertionError("news have no end")

    def news(self) -> Iterator[News]:
        """Wait for news, without end; an interrupt stops what runs."""
        stopping = False
        while True:
            if self.interrupted and not stopping:
                stopping = True
                self.session.stop()
            with suppress(queue.Empty):
                yield self._news.get(timeout=INTERRUPT_POLL_S)

    def check(self) -> None:
        """Look for the loss of the model while nothing is asked of it.

        Raises:
            Ended: it was lost, or somebody wants an end.
        """
        if self.interrupted:
            raise Ended(self.cancelled)
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, Failed | Crashed):
                raise Ended(news)

    # ------------------------------------------------------------------ requests

    def ask(self, request: AnyModelRequest) -> RequestStream:
        """Ask the loaded model.

        Raises:
            Ended: the model was lost a moment ago, with the event that says why.
        """
        try:
            return self.session.stream(request)
        except ArgumentError as error:
            deadline_s = time.monotonic() + _LOSS_S
            while time.monotonic() < deadline_s:
                with suppress(queue.Empty):
                    news = self._news.get(timeout=INTERRUPT_POLL_S)
                    if isinstance(news, Failed | Crashed):
                        raise Ended(news) from None
            raise Ended(Failed(kind=error.kind, message=error.summary())) from None

    def events(self, stream: RequestStream, *, stops: bool = True) -> Iterator[RequestEvent]:
        """Wait for each event of a request; an interrupt stops the request, if it `stops`."""
        while True:
            if self.interrupted and stops:
                stops = False
                stream.stop()
            with suppress(queue.Empty):
                event = stream.next(INTERRUPT_POLL_S)
                yield event
                if isinstance(event, RequestEnding):
                    return

    def answer_of(self, request: AnyModelRequest, *, stops: bool = True) -> LastWord | BadEnding:
        """Return the child's last word on a request that generates nothing, or the ending of one that failed.

        Raises:
            Ended: as `ask`.
        """
        *_, ending = self.events(self.ask(request), stops=stops)
        assert not isinstance(ending, Done | Token | Reading)
        return ending.answer if isinstance(ending, Answered) else ending


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
