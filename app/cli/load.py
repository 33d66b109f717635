"""`load`: a real load, its events, and generation when there is a prompt."""

from __future__ import annotations

import queue
from argparse import Namespace
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from app.cli import exit_codes
from app.cli.auto_options import constraints_of
from app.cli.inputs import read_inputs
from app.cli.interrupts import on_interrupt
from app.cli.printers import JsonPrinter, Printer, TextPrinter
from app.cli.prompts import AnswerEnding, Answers, Ending, prompts_of
from engine.errors import ArgumentError, EngineError, RuleViolationError
from engine.plan.plan import Plan
from engine.probing.probe import probe
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
from engine.session.load_order import LoadOrder, RetryPolicy
from engine.session.session import ModelSession
from engine.session.snapshot import Phase, Snapshot
from engine.telemetry.memory_holders import memory_holders

INTERRUPT_POLL_S = 0.2
"""Python runs signal handlers in the main thread only: a wait without limit would hold them up on Windows."""

_E = TypeVar("_E", Token, Done | OutOfMemory | Failed | Crashed | Cancelled)


def run_load(options: Namespace) -> int:
    """Load a layout and report events; with --prompt or --prompts also generate."""
    printer: Printer = JsonPrinter() if options.json else TextPrinter()
    requests = tuple(_generate_request(prompt, options) for prompt in prompts_of(options))
    try:
        order = _make_order(options, printer)
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


def _make_order(options: Namespace, printer: Printer) -> LoadOrder:
    asked = read_inputs(options)
    if asked.explanation is not None:
        printer.explain(asked.explanation)
    plan = asked.plan
    if plan.violations:
        raise RuleViolationError(tuple((v.rule, v.message, v.remedy) for v in plan.violations))
    if plan.report.probe_only is not None:
        plan = _probed(plan)
    return LoadOrder(plan, RetryPolicy(options.retry, constraints_of(options, plan.rig, plan.model.n_layers)))


def _probed(plan: Plan) -> Plan:
    """Return a plan that only a probe can forecast with its numbers; as it is where that fails: the load says why."""
    try:
        return probe(plan)
    except EngineError:
        return plan


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
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._session = ModelSession(self._news.put, holders=memory_holders)
        self._stage: Stage = "header"
        self._open: set[int] = set()
        self._answers = Answers()
        self._interrupted = False

    def run(self) -> int:
        """Return the exit code; no process of ours is left when it does."""
        with on_interrupt(self._interrupt):
            try:
                self._session.load(self._order)
                ending = self._follow()
                if self._interrupted:
                    # What was asked for last was to stop, whatever came of the load meanwhile.
                    ending = Cancelled(stage=self._stage)
                self._printer.show(ending)
                return _exit_code(ending)
            finally:
                self._session.close()

    def _interrupt(self) -> None:
        self._interrupted = True

    def _follow(self) -> Ending:
        """Show everything up to the ending, which is returned."""
        stopping = False
        while True:
            if self._interrupted and not stopping:
                stopping = True
                self._session.stop()
            try:
                news = self._news.get(timeout=INTERRUPT_POLL_S)
            except queue.Empty:
                continue
            ending = self._take(news)
            if ending is not None:
                return ending

    def _take(self, news: News) -> Ending | None:
        """Show what is no ending; return the last one."""
        match news:
            case Snapshot():
                if news.phase is Phase.LOADING:
                    self._printer.child_started()
            case Progress():
                self._stage = news.stage
                self._printer.show(news)
            case Attempt():
                self._printer.show(news)
            case Token():
                self._printer.show(self._shown(news))
            case Loaded() if self._requests and not self._interrupted:
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
                self._open.add(self._session.ask(request))
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
