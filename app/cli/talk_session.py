"""The model of a talk: one queue for all that is told, from its child and from the disk, read by one thread."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from app.cli import exit_codes
from app.cli.chat_printers import ChatPrinter
from engine.chats.thinking import Told
from engine.errors import ArgumentError, EngineError
from engine.plan.plan import Plan
from engine.protocol.messages import AnyModelRequest, LastWord
from engine.session.driver import News
from engine.session.events import (
    Answered,
    Attempt,
    Cancelled,
    Crashed,
    Done,
    Failed,
    Loaded,
    OutOfMemory,
    Progress,
    RequestEnding,
    Stage,
)
from engine.session.load_order import LoadOrder
from engine.session.session import ModelSession
from engine.session.snapshot import Snapshot
from engine.session.status import Phase
from engine.telemetry.memory_holders import memory_holders

POLL_S = 0.2


class Shown(NamedTuple):
    """A piece of the answer that is on disk."""

    told: Told
    error: EngineError | None


class Kept(NamedTuple):
    """The answer is on disk, and every piece of it has been told."""

    error: BaseException | None


TalkNews = News | Shown | Kept


class Over(Exception):
    """The talk ends with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(str(code))
        self.code = code


class TalkSession:
    """`put` takes what is told from any thread; all else is for the thread of the talk. `states`: a folder for saved
    sequences, None: none are kept."""

    def __init__(self, printer: ChatPrinter, states: Path | None) -> None:
        self._printer = printer
        self._news: queue.SimpleQueue[TalkNews] = queue.SimpleQueue()
        self._session = ModelSession(self._news.put, holders=memory_holders, sequences=states)
        self._stage: Stage = "header"
        self.interrupts = 0
        """How often somebody wanted an end."""
        self.heeded = 0
        """As many of them were about an answer that has ended since."""

    def put(self, news: TalkNews) -> None:
        """Take news."""
        self._news.put(news)

    def on_interrupt(self) -> None:
        """Note that somebody wants an end."""
        self.interrupts += 1

    def close(self) -> None:
        """End the child."""
        self._session.close()

    def load(self, order: LoadOrder) -> None:
        """Load, and show how that goes.

        Raises:
            Over: with what became of it, unless it is loaded.
        """
        self._session.load(order)
        for news in self.next_news(self._session.stop):
            match news:
                case Snapshot() if news.phase is Phase.LOADING:
                    self._printer.load.child_started()
                case Progress():
                    self._stage = news.stage
                    self._printer.load.show(news)
                case Attempt():
                    self._printer.load.show(news)
                case Loaded() if not self.interrupts:
                    self._printer.load.show(news)
                    return
                case Loaded():
                    self.interrupted()
                case OutOfMemory() | Failed() | Crashed() | Cancelled():
                    self.end(news)

    @property
    def loaded_plan(self) -> Plan | None:
        """What is loaded, which may have stepped back from what was asked for; None where the model was lost."""
        loaded = self._session.snapshot.loaded
        return None if loaded is None else loaded.order.plan

    @property
    def n_ctx(self) -> int | None:
        """Tokens that one request may take of the loaded context; None where the model was lost."""
        return self._session.snapshot.context_size

    def end(self, ending: RequestEnding) -> None:
        """Show the last event.

        Raises:
            Over: always.
        """
        self._printer.load.show(ending)
        match ending:
            case OutOfMemory():
                raise Over(exit_codes.DOES_NOT_FIT)
            case Cancelled():
                raise Over(exit_codes.INTERRUPTED)
            case Failed() | Crashed():
                raise Over(exit_codes.exit_code(ending.kind))
        raise Over(exit_codes.OK)

    def interrupted(self) -> None:
        """End because somebody wants to; raises as `end` does."""
        self.end(Cancelled(stage=self._stage))

    def look(self) -> None:
        """End where the model was lost while nothing was asked of it; raises as `end` does."""
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, Failed | Crashed):
                self.end(news)

    def request(self, request: AnyModelRequest) -> int:
        """Ask; a model that was lost a moment ago ends the talk.

        Raises:
            Over: with what was said of the loss.
        """
        try:
            return self._session.ask(request)
        except ArgumentError as error:
            self.end(Failed(kind=error.kind, message=error.summary()))
            raise AssertionError("it has ended") from None

    def answer_of(self, request: AnyModelRequest) -> LastWord | RequestEnding:
        """Return the child's last word on a request that generates nothing, or the ending of one that failed."""
        number = self.request(request)
        for news in self.next_news(lambda: None):
            if isinstance(news, Answered) and news.request == number:
                return news.answer
            if isinstance(news, OutOfMemory | Failed | Crashed | Cancelled) and news.request == number:
                return news
            if isinstance(news, Failed | Crashed) and news.request is None:
                self.end(news)
        raise AssertionError("news have no end")

    def news_of(self, request: int) -> Iterator[TalkNews]:
        """Return news while an answer is written, its ending last; an interrupt stops the answer."""
        for news in self.next_news(lambda: self._session.stop(request)):
            is_ending = isinstance(news, Done | OutOfMemory | Failed | Crashed | Cancelled)
            is_last = is_ending and news.request in (request, None)  # type: ignore[union-attr]
            if is_last:
                # What comes when the ending is shown is about the talk.
                self.heeded = self.interrupts
            yield news
            if is_last:
                return

    def next_news(self, stop: Callable[[], None]) -> Iterator[TalkNews]:
        """Wait for news, without end; an interrupt meanwhile calls `stop`, once."""
        before, stopping = self.interrupts, False
        while True:
            if self.interrupts > before and not stopping:
                stopping = True
                stop()
            try:
                yield self._news.get(timeout=POLL_S)
            except queue.Empty:
                continue
