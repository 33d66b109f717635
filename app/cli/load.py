"""`load`: a real load, its events, and generation when there is a prompt."""

from __future__ import annotations

import queue
from argparse import Namespace

from app.cli import exit_codes
from app.cli.auto_options import constraints_of
from app.cli.inputs import read_inputs
from app.cli.interrupts import on_interrupt
from app.cli.printers import JsonPrinter, Printer, TextPrinter
from engine.errors import ArgumentError, EngineError, RuleViolationError
from engine.plan.plan import Plan
from engine.runner.client import LoadOrder, RunnerState
from engine.runner.events import (
    AnyEvent,
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
from engine.runner.load_loop import LoadLoop
from engine.runner.load_order import RetryPolicy
from engine.runner.probe import probe
from engine.runner.protocol import ChatMessage, Generate
from engine.telemetry.memory_holders import memory_holders

INTERRUPT_POLL_S = 0.2
"""Python runs signal handlers in the main thread only: a wait without limit would hold them up on Windows."""

_Ending = Loaded | Done | OutOfMemory | Failed | Crashed | Cancelled


def run_load(options: Namespace) -> int:
    """Load a layout and report events; with --prompt also generate."""
    printer: Printer = JsonPrinter() if options.json else TextPrinter()
    generate = _generate_request(options)
    try:
        order = _make_order(options, printer)
    except KeyboardInterrupt:
        printer.show(Cancelled(stage="header"))
        return exit_codes.INTERRUPTED
    return LoadRun(order, generate, printer).run()


def _generate_request(options: Namespace) -> Generate | None:
    if options.prompt is None:
        return None
    try:
        options.prompt.encode()
    except UnicodeEncodeError:
        raise ArgumentError("The prompt is not UTF-8 text; give it in UTF-8.") from None
    return Generate(
        messages=(ChatMessage(role="user", content=options.prompt),),
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


class LoadRun:
    """One load (and generation) from start to the last event. Interrupts cancel it."""

    def __init__(self, order: LoadOrder, generate: Generate | None, printer: Printer) -> None:
        self._order = order
        self._generate = generate
        self._printer = printer
        self._happenings: queue.SimpleQueue[AnyEvent | RunnerState] = queue.SimpleQueue()
        self._runner = LoadLoop(self._happenings.put, on_state=self._happenings.put, holders=memory_holders)
        self._stage: Stage = "header"
        self._interrupted = False

    def run(self) -> int:
        """Return the exit code; no process of ours is left when it does."""
        with on_interrupt(self._interrupt):
            try:
                self._runner.load(self._order)
                ending = self._follow()
                if self._interrupted:
                    # What was asked for last was to stop, whatever came of the load meanwhile.
                    ending = Cancelled(stage=self._stage)
                self._printer.show(ending)
                return _exit_code(ending)
            finally:
                self._runner.close()

    def _interrupt(self) -> None:
        self._interrupted = True

    def _follow(self) -> _Ending:
        """Show everything up to the ending, which is returned."""
        stopping = False
        while True:
            if self._interrupted and not stopping:
                stopping = True
                self._runner.stop()
            try:
                happening = self._happenings.get(timeout=INTERRUPT_POLL_S)
            except queue.Empty:
                continue
            if isinstance(happening, RunnerState):
                if happening is RunnerState.LOADING:
                    self._printer.child_started()
            elif isinstance(happening, Progress):
                self._stage = happening.stage
                self._printer.show(happening)
            elif isinstance(happening, Attempt | Token):
                self._printer.show(happening)
            elif isinstance(happening, Loaded) and self._generate is not None and not self._interrupted:
                self._printer.show(happening)
                self._runner.generate(self._generate)
            else:
                return happening


def _exit_code(ending: _Ending) -> int:
    match ending:
        case Loaded() | Done():
            return exit_codes.OK
        case OutOfMemory():
            return exit_codes.DOES_NOT_FIT
        case Cancelled():
            return exit_codes.INTERRUPTED
        case Failed() | Crashed():
            return exit_codes.exit_code(ending.kind)
