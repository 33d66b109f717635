"""The `embed` command: loads a model, and prints a vector for each text."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from app.cli import exit_codes
from app.cli.follow import BadEnding, Ended, Follower, exit_code_of
from app.cli.inputs import spec_of
from app.cli.output import check_text, print_compact, print_document, print_line
from app.cli.printers import TextPrinter
from engine.runtime.protocol.messages import Embedded
from engine.runtime.protocol.requests import Embed
from engine.runtime.session.events import Cancelled, Loaded, OutOfMemory
from engine.runtime.session.load_spec import LoadSpec

# Values of a vector in the output for people.
_SHOWN = 8


def run_embed(options: Namespace) -> int:
    """Load a layout, print a vector for each text, and return the exit code."""
    for text in options.texts:
        check_text(text, "A text")
    printer = None if options.json else TextPrinter()
    try:
        spec = spec_of(options, _silence if printer is None else printer.explain)
        return _end(_vectors(spec, options.texts, printer), printer)
    except KeyboardInterrupt:
        return _end(Cancelled(stage="header"), printer)


def _silence(_explanation: str) -> None:
    """Discard the explanation of an automatic layout: the JSON document has no field for it."""


def _vectors(spec: LoadSpec, texts: Sequence[str], printer: TextPrinter | None) -> Embedded | BadEnding:
    """Load the layout of `spec` and return a vector for each of `texts`, or the last event if that fails.

    `printer`: prints the progress of the load; None prints nothing.
    """
    follower = Follower()
    with follower.loading(spec):
        loaded = follower.load(printer)
        if not isinstance(loaded, Loaded):
            return loaded
        if printer is not None:
            printer.show(loaded)
        try:
            answer = follower.answer_of(Embed(texts=tuple(texts)))
        except Ended as ended:
            answer = ended.ending
        # What was asked for last was to stop, whatever came of the rest meanwhile.
        if follower.interrupted:
            return follower.cancelled
    assert isinstance(answer, Embedded | BadEnding)
    return answer


def _end(ending: Embedded | BadEnding, printer: TextPrinter | None) -> int:
    """Print the vectors or the error in `ending`, and return the exit code. `printer`: None prints JSON."""
    if isinstance(ending, Embedded):
        _print(ending.vectors, printer)
        return exit_codes.OK
    if printer is not None:
        printer.show(ending)
    else:
        print_document({"error": _error(ending)})
    return exit_code_of(ending)


def _print(vectors: Sequence[Sequence[float]], printer: TextPrinter | None) -> None:
    if printer is None:
        print_compact({"embeddings": vectors})
        return
    for vector in vectors:
        more = " ..." if len(vector) > _SHOWN else ""
        print_line(f"{len(vector)} values: {' '.join(f'{value:.4f}' for value in vector[:_SHOWN])}{more}")


def _kind(ending: BadEnding) -> str:
    match ending:
        case OutOfMemory():
            return "does_not_fit"
        case Cancelled():
            return "cancelled"
        case _:
            return ending.kind


def _error(ending: BadEnding) -> dict[str, object]:
    """Return the fields of the JSON error document: kind and message, and numbers and proposals if memory ran out."""
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
