"""`load`: a real load, its events, and generation when there is a prompt."""

from __future__ import annotations

import queue
import signal
import sys
from argparse import Namespace
from types import FrameType

from app.cli import exit_codes
from app.cli.inputs import read_inputs
from app.cli.output import print_document, print_event, print_line
from engine.errors import RuleViolationError
from engine.fit.preview import make_report
from engine.runner.client import LoadJob, Runner
from engine.runner.events import (
    AnyEvent,
    Cancelled,
    Crashed,
    Done,
    Failed,
    Loaded,
    OutOfMemory,
    Progress,
    Token,
)
from engine.runner.protocol import ChatMessage, Generate
from engine.units import format_bytes

_BEFORE_CHILD = ("header", "fit")
INTERRUPT_POLL_S = 0.2
"""Python runs signal handlers in the main thread only: a wait without limit would hold them up on Windows."""


def run_load(options: Namespace) -> int:
    """Load a layout and report events; with --prompt also generate."""
    inputs = read_inputs(options)
    report = make_report(inputs.model, inputs.rig, inputs.layout, inputs.context)
    if report.violations:
        raise RuleViolationError(tuple((v.rule, v.message, v.remedy) for v in report.violations))
    job = LoadJob(
        model=inputs.model, rig=inputs.rig, layout=inputs.layout, context=inputs.context, forecast=report.rows
    )
    generate = None
    if options.prompt is not None:
        generate = Generate(
            messages=(ChatMessage(role="user", content=options.prompt),),
            max_tokens=options.max_tokens,
            seed=options.seed,
            temperature=options.temp,
        )
    printer = JsonPrinter() if options.json else TextPrinter()
    return LoadRun(job, generate, printer).run()


class LoadRun:
    """One load (and generation) from start to the last event. Interrupts cancel it."""

    def __init__(self, job: LoadJob, generate: Generate | None, printer: JsonPrinter | TextPrinter) -> None:
        self._job = job
        self._generate = generate
        self._printer = printer
        self._events: queue.SimpleQueue[AnyEvent] = queue.SimpleQueue()
        self._runner = Runner(self._events.put)
        self._interrupted = False

    def run(self) -> int:
        """Return the exit code; no process of ours is left when it does."""
        handled = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
        before = {number: signal.signal(number, self._on_signal) for number in handled}
        try:
            self._runner.load(self._job)
            return self._follow()
        finally:
            self._runner.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._interrupted = True

    def _follow(self) -> int:
        stopping = False
        while True:
            if self._interrupted and not stopping:
                stopping = True
                self._runner.stop()
            try:
                event = self._events.get(timeout=INTERRUPT_POLL_S)
            except queue.Empty:
                continue
            if isinstance(event, Loaded) and self._generate is not None and not stopping:
                self._printer.show(event)
                self._runner.generate(self._generate)
                continue
            self._printer.show(event)
            if not isinstance(event, Progress | Token):
                return exit_codes.INTERRUPTED if self._interrupted else _exit_code(event)


def _exit_code(event: Loaded | Done | OutOfMemory | Failed | Crashed | Cancelled) -> int:
    match event:
        case Loaded() | Done():
            return exit_codes.OK
        case OutOfMemory():
            return exit_codes.DOES_NOT_FIT
        case Cancelled():
            return exit_codes.INTERRUPTED
        case Failed() | Crashed():
            return exit_codes.exit_code(event.kind)


class JsonPrinter:
    """One event a line; a failure before the child started is the one error document."""

    def __init__(self) -> None:
        self._held: list[Progress] = []
        self._child_started = False

    def show(self, event: AnyEvent) -> None:
        if not self._child_started:
            if isinstance(event, Progress) and event.stage in _BEFORE_CHILD:
                self._held.append(event)
                return
            if isinstance(event, Failed):
                print_document({"error": {"kind": event.kind, "message": event.message}})
                return
            self._child_started = True
            for progress in self._held:
                print_event(progress)
        print_event(event)


class TextPrinter:
    """Progress on standard error, generated text on standard output."""

    def show(self, event: AnyEvent) -> None:
        match event:
            case Progress():
                part = "" if event.fraction is None else f" {event.fraction:.0%}"
                where = f" on {event.device}" if event.device else ""
                sys.stderr.write(f"\r\x1b[K{event.stage.replace('_', ' ')}{part}{where}")
            case Loaded():
                sys.stderr.write("\r\x1b[Kloaded\n")
                for row in event.devices:
                    sys.stderr.write(f"  {row.id}: {format_bytes(row.need_bytes)}\n")
            case Token():
                sys.stdout.write(event.text)
                sys.stdout.flush()
            case Done():
                print_line("")
                sys.stderr.write(
                    f"prompt {event.prompt_tokens_per_second:.1f} tokens/s, "
                    f"generation {event.generation_tokens_per_second:.1f} tokens/s\n"
                )
            case OutOfMemory() | Failed() | Crashed():
                sys.stderr.write(f"\r\x1b[Klayerdeck-cli: {event.message}\n")
            case Cancelled():
                sys.stderr.write(f"\r\x1b[Kcancelled while in stage {event.stage}\n")
