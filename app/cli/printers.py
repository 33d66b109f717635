"""Output of `load`: events as JSON lines for programs, or text for people."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from app.cli.output import print_document, print_event, print_line, print_notice, print_stderr, print_text
from engine.base.texts import escape
from engine.base.units import format_bytes
from engine.devices.telemetry.sample import holder_text
from engine.planning.plan.placement_check import difference_text
from engine.planning.plan.report import DeviceRow
from engine.runtime.session.drafts import draft_words
from engine.runtime.session.events import (
    AnyEvent,
    Attempt,
    Cancelled,
    Crashed,
    Done,
    Failed,
    Fallback,
    Loaded,
    OutOfMemory,
    Progress,
    Token,
    sent_text,
)


class JsonPrinter:
    """Prints events as JSON lines. A failure before the child starts is printed as the error document instead."""

    def __init__(self) -> None:
        self._held: list[Progress | Attempt | Fallback] = []
        self._child_started = False

    def child_started(self) -> None:
        """Print the events that were held back until the child process started. Later ones are printed at once.

        They are held back because a load that fails before its child starts must print the error document alone.
        """
        self._child_started = True
        for event in self._held:
            print_event(event)
        self._held.clear()

    def explain(self, explanation: str) -> None:
        """Print nothing: only the JSON document of `plan` has a field for the explanation."""

    def show(self, event: AnyEvent) -> None:
        if isinstance(event, Failed) and not self._child_started:
            print_document({"error": {"kind": event.kind, "message": event.message}})
        elif isinstance(event, Progress | Attempt | Fallback) and not self._child_started:
            # If the load fails before its child starts, the error document has to be the only output.
            self._held.append(event)
        else:
            self.child_started()
            print_event(event)


class TextPrinter:
    """Prints progress and reports on standard error, and generated text on standard output."""

    def __init__(self) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._text_on_terminal = sys.stdout.isatty()
        self._shown = ""
        self._in_text = False
        # Texts of parallel answers. Each is printed when it has ended, because mixed lines would be unreadable.
        self._texts: dict[int, str] = {}

    def child_started(self) -> None:
        """Do nothing: the text output is the same before and after the child has started."""

    def explain(self, explanation: str) -> None:
        """Print `explanation`, a text that says why the automatic layout was chosen."""
        self._print_stderr(explanation)

    def show(self, event: AnyEvent) -> None:
        match event:
            case Token() if event.request is not None:
                self._texts[event.request] = self._texts.get(event.request, "") + event.text
                return
            case Done() | OutOfMemory() | Failed() | Crashed() | Cancelled() if event.request is not None:
                self._print_stderr(f"answer {event.request}")
                self._show_text(self._texts.pop(event.request, ""))
        self._show_plain(event)

    def _show_plain(self, event: AnyEvent) -> None:
        match event:
            case Progress():
                self._show_progress(event)
            case Attempt():
                # Each attempt goes through all stages again.
                self._shown = ""
                self._print_stderr(f"attempt {event.number}: {event.layout}")
                self._print_stderr(f"  {event.reason}")
            case Fallback():
                self._shown = ""
                print_notice(event.message, over=self._on_terminal)
            case Loaded():
                for line in _loaded_lines(event):
                    self._print_stderr(line)
            case Token():
                self._show_text(event.text)
            case Done():
                self._end_text()
                self._print_stderr(
                    f"prompt {event.prompt_tokens_per_second:.1f} tokens/s, "
                    f"generation {event.generation_tokens_per_second:.1f} tokens/s"
                )
                for words in draft_words(event.draft):
                    self._print_stderr(words)
                if event.replaced:
                    print_notice(event.replaced, over=self._on_terminal)
            case OutOfMemory() | Failed() | Crashed():
                self._end_text()
                print_notice(event.message, over=self._on_terminal)
                for line in _remedy_lines(event) if isinstance(event, OutOfMemory) else ():
                    self._print_stderr(line)
            case Cancelled():
                self._end_text()
                print_notice("cancelled", over=self._on_terminal)

    def _show_progress(self, event: Progress) -> None:
        """Replace the progress line on a terminal; elsewhere print a line for each new stage."""
        stage = event.stage.replace("_", " ")
        if not self._on_terminal:
            if stage != self._shown:
                self._print_stderr(stage)
            self._shown = stage
            return
        part = "" if event.fraction is None else f" {event.fraction:.0%}"
        where = f" on {event.device}" if event.device else ""
        print_stderr(f"{stage}{part}{where}", end="", over=True)

    def _show_text(self, text: str) -> None:
        self._in_text = self._in_text or bool(text)
        print_text(escape(text, keep_lines=True) if self._text_on_terminal else text)

    def _print_stderr(self, line: str) -> None:
        print_stderr(line, over=self._on_terminal)

    def _end_text(self) -> None:
        if self._in_text:
            print_line("")
        self._in_text = False


Printer = JsonPrinter | TextPrinter


def _loaded_lines(event: Loaded) -> Iterator[str]:
    yield "loaded"
    yield from _row_lines(event.devices, event.forecast)
    if event.elsewhere:
        yield f"layerdeck-cli: {difference_text(event.elsewhere)}"
    if event.seconds:
        stages = ", ".join(f"{stage.replace('_', ' ')} {each:.1f} s" for stage, each in event.seconds.items())
        yield f"the load took {sum(event.seconds.values()):.1f} s: {stages}"
    for each in event.sent:
        yield f"  {sent_text(each)}"


def _remedy_lines(event: OutOfMemory) -> list[str]:
    """Return lines with the processes that use the memory, and with proposals after which the load should fit."""
    lines = [f"Memory of {event.device} is used by:"] if event.holders else []
    lines += [f"  {holder_text(each)}" for each in event.holders]
    lines += ["What should fit:"] if event.proposals else []
    return lines + [f"  {proposal}" for proposal in event.proposals]


def _row_lines(measured: tuple[DeviceRow, ...], forecast: tuple[DeviceRow, ...]) -> list[str]:
    # The engine's numbers do not include the overhead of drivers.
    expected = {row.id: row.without_overhead().need_bytes for row in forecast}
    lines = []
    for row in measured:
        known = expected.get(row.id)
        forecast_text = "" if known is None else f" (forecast {format_bytes(known)})"
        lines.append(f"  {row.id}: {format_bytes(row.need_bytes)}{forecast_text}")
    return lines
