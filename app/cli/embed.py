"""`embed`: a load, then one vector for each text."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress

from app.cli import exit_codes
from app.cli.follow import Follower
from app.cli.inputs import order_of
from app.cli.output import print_compact, print_document, print_line
from app.cli.printers import TextPrinter
from app.cli.prompts import check_text
from engine.errors import ArgumentError
from engine.protocol.messages import Embed, Embedded
from engine.session.driver import News
from engine.session.events import (
    Answered,
    Attempt,
    Cancelled,
    Crashed,
    Failed,
    Loaded,
    OutOfMemory,
    Progress,
    Stage,
)

_SHOWN = 8
"""Values of a vector that people are shown."""

_Ending = Answered | OutOfMemory | Failed | Crashed | Cancelled


def run_embed(options: Namespace) -> int:
    """Load a layout and print a vector for each text."""
    for text in options.texts:
        check_text(text, "A text")
    printer = None if options.json else TextPrinter()
    try:
        order = order_of(options, _silence if printer is None else printer.explain)
    except KeyboardInterrupt:
        return _end(Cancelled(stage="header"), printer)
    follower = Follower()
    with follower.loading(order):
        run = _EmbedRun(follower, options.texts, printer)
        return _end(next(ending for news in follower.news() if (ending := run.take(news)) is not None), printer)


def _silence(_explanation: str) -> None:
    """The one document has no place for it; that of `plan` has."""


class _EmbedRun:
    """What comes of one load and of the one request on it; people see how far it is."""

    def __init__(self, follower: Follower, texts: Sequence[str], printer: TextPrinter | None) -> None:
        self._follower, self._texts, self._printer = follower, texts, printer
        self._stage: Stage = "header"

    def take(self, news: News) -> _Ending | None:
        """Return the ending."""
        match news:
            case Progress() | Attempt():
                if isinstance(news, Progress):
                    self._stage = news.stage
                if self._printer is not None:
                    self._printer.show(news)
            case Loaded():
                if self._follower.interrupted:
                    return Cancelled(stage=self._stage)
                if self._printer is not None:
                    self._printer.show(news)
                self._ask()
            case Answered() | OutOfMemory() | Failed() | Crashed() | Cancelled():
                # what was asked for last was to stop, whatever came of the rest meanwhile
                return Cancelled(stage=self._stage) if self._follower.interrupted else news
        return None

    def _ask(self) -> None:
        with suppress(ArgumentError):  # The model was lost a moment ago; that is the next news.
            self._follower.session.ask(Embed(texts=tuple(self._texts)))


def _end(ending: _Ending, printer: TextPrinter | None) -> int:
    """Print the ending and return the exit code."""
    if isinstance(ending, Answered):
        assert isinstance(ending.answer, Embedded)
        _print(ending.answer.vectors, printer)
        return exit_codes.OK
    if printer is not None:
        printer.show(ending)
    else:
        print_document({"error": _error(ending)})
    return exit_codes.exit_code(_kind(ending))


def _print(vectors: Sequence[Sequence[float]], printer: TextPrinter | None) -> None:
    if printer is None:
        print_compact({"embeddings": vectors})
        return
    for vector in vectors:
        more = " ..." if len(vector) > _SHOWN else ""
        print_line(f"{len(vector)} values: {' '.join(f'{value:.4f}' for value in vector[:_SHOWN])}{more}")


def _kind(ending: OutOfMemory | Failed | Crashed | Cancelled) -> str:
    match ending:
        case OutOfMemory():
            return "does_not_fit"
        case Cancelled():
            return "cancelled"
        case _:
            return ending.kind


def _error(ending: OutOfMemory | Failed | Crashed | Cancelled) -> dict[str, object]:
    """Return what the error document says: there are no events that could."""
    if isinstance(ending, Cancelled):
        return {"kind": _kind(ending), "message": "Cancelled before the texts were embedded."}
    fields: dict[str, object] = {"kind": _kind(ending), "message": ending.message}
    if isinstance(ending, OutOfMemory):
        fields |= {
            "device": ending.device,
            "requested_bytes": ending.requested_bytes,
            "free_bytes": ending.free_bytes,
            "proposals": ending.proposals,
        }
    return fields
