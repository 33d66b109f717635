"""`load`: a real load, its events, and generation when there is a prompt."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from app.cli import exit_codes
from app.cli.follow import Follower
from app.cli.orders import order_of
from app.cli.printers import JsonPrinter, Printer, TextPrinter
from app.cli.prompts import AnswerEnding, Answers, Ending, prompts_of
from app.cli.speeds import learn_speed
from engine.errors import ArgumentError
from engine.plan.plan import Plan
from engine.protocol.messages import ChatMessage, Generate
from engine.session.driver import News
from engine.session.events import (
    Attempt,
    Cancelled,
    Crashed,
    Done,
    Failed,
    Loaded,
    OutOfMemory,
    Progress,
    Stage,
    Token,
)
from engine.session.load_order import LoadOrder
from engine.session.snapshot import Snapshot
from engine.session.status import Phase

_E = TypeVar("_E", Token, Done | OutOfMemory | Failed | Crashed | Cancelled)


def run_load(options: Namespace) -> int:
    """Load a layout and report events; with --prompt or --prompts also generate."""
    printer: Printer = JsonPrinter() if options.json else TextPrinter()
    requests = tuple(_generate_request(prompt, options) for prompt in prompts_of(options))
    try:
        order = order_of(options, printer.explain)
    except KeyboardInterrupt:
        printer.show(Cancelled(stage="header"))
        return exit_codes.INTERRUPTED
    return LoadCommand(order, requests, printer, numbered=options.prompts is not None).run()


def _generate_request(prompt: str, options: Namespace) -> Generate:
    return Generate(
        messages=(ChatMessage(role="user", content=prompt),),
        max_tokens=options.max_tokens,
        seed=options.seed,
        temperature=options.temp,
    )


class LoadCommand:
    """One load, and the answers to its prompts, from start to the last event. Interrupts cancel it.

    `numbered`: each event of an answer says of which prompt, and a last line ends them all.
    """

    def __init__(
        self, order: LoadOrder, requests: Sequence[Generate], printer: Printer, *, numbered: bool = False
    ) -> None:
        self._order = order
        self._requests, self._numbered = requests, numbered
        self._printer = printer
        self._follower = Follower()
        self._stage: Stage = "header"
        self._loaded: Plan | None = None
        self._open: set[int] = set()
        self._answers = Answers()

    def run(self) -> int:
        """Return the exit code; no process of ours is left when it does."""
        with self._follower.loading(self._order):
            ending = self._follow()
            if self._follower.interrupted:
                # What was asked for last was to stop, whatever came of the load meanwhile.
                ending = Cancelled(stage=self._stage)
            self._printer.show(ending)
        # Prompts that are answered at once share the devices, which no prediction is about.
        if isinstance(ending, Done) and len(self._requests) == 1 and (loaded := self._loaded) is not None:
            learn_speed(loaded, ending)
        return _exit_code(ending)

    def _follow(self) -> Ending:
        """Show everything up to the ending, which is returned."""
        return next(ending for news in self._follower.news() if (ending := self._take(news)) is not None)

    def _take(self, news: News) -> Ending | None:
        """Show what is no ending; return the last one."""
        match news:
            case Snapshot():
                self._loaded = news.loaded.order.plan if news.loaded is not None else self._loaded
                if news.phase is Phase.LOADING:
                    self._printer.child_started()
            case Progress():
                self._stage = news.stage
                self._printer.show(news)
            case Attempt():
                self._printer.show(news)
            case Token():
                self._printer.show(self._shown(news))
            case Loaded() if self._requests and not self._follower.interrupted:
                self._printer.show(news)
                self._ask()
            case Done() | OutOfMemory() | Failed() | Crashed() | Cancelled() if news.request is not None:
                return self._end_answer(news)
            case Loaded() | OutOfMemory() | Failed() | Crashed() | Cancelled():
                return news
        return None

    def _ask(self) -> None:
        self._answers.begin()
        try:
            for request in self._requests:
                self._open.add(self._follower.session.ask(request))
        except ArgumentError:
            pass  # The model was lost a moment ago; its ending, or that of what was asked before, comes next.

    def _end_answer(self, ending: AnswerEnding) -> Ending | None:
        assert ending.request is not None
        self._open.remove(ending.request)
        self._answers.add(ending)
        if not self._numbered:
            return self._shown(ending)
        self._printer.show(ending)
        return None if self._open else self._answers.summary()

    def _shown(self, event: _E) -> _E:
        """Return `event` as it is told: of the only prompt nobody need say which it is."""
        return event if self._numbered else msgspec.structs.replace(event, request=None)


def _exit_code(ending: Ending) -> int:
    match ending:
        case Loaded() | Done():
            return exit_codes.OK
        case OutOfMemory():
            return exit_codes.DOES_NOT_FIT
        case Cancelled():
            return exit_codes.INTERRUPTED
        case Failed() | Crashed():
            return exit_codes.exit_code(ending.kind)
