"""What the command line prints: JSON documents, events and error documents."""

from __future__ import annotations

import sys

import msgspec

from engine.errors import EngineError, RuleViolationError

JSON_INDENT = 2


def print_document(document: object) -> None:
    """Print one JSON document, indented, flushed."""
    encoded = msgspec.json.format(msgspec.json.encode(document), indent=JSON_INDENT)
    print_line(encoded.decode())


def print_event(event: msgspec.Struct) -> None:
    """Print one event on a line of its own, flushed."""
    print_line(msgspec.json.encode(event).decode())


def print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def error_document(error: EngineError) -> dict[str, object]:
    """Return the contract's error document for `error`."""
    fields: dict[str, object] = {"kind": error.kind, "message": error.summary(), **error.fields()}
    if isinstance(error, RuleViolationError):
        fields["violations"] = [
            {"rule": rule, "message": message, "remedy": remedy} for rule, message, remedy in error.violations
        ]
    return {"error": fields}


def report_error(error: EngineError, *, as_json: bool) -> None:
    """Print `error`: as the one document on standard output, or as a sentence on standard error."""
    if as_json:
        print_document(error_document(error))
    else:
        sys.stderr.write(f"layerdeck-cli: {error.summary()}\n")
