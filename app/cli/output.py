"""Output of the command line (JSON documents, events, text, error documents), and the check of texts it is given."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

from engine.base.errors import ArgumentError, EngineError, RuleViolationError
from engine.base.texts import escape, escape_json

if TYPE_CHECKING:
    import msgspec

JSON_INDENT = 2
_CLEAR_LINE = "\r\x1b[K"


class OutputError(ArgumentError):
    """Standard output cannot be written to (a full disk); nothing more can be said there."""


def prepare_streams() -> None:
    """Make the output UTF-8, whatever the locale says."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def silence_stdout() -> None:
    """Send what is still unwritten nowhere, so that the interpreter does not fail again when it flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def print_document(document: object) -> None:
    """Print one JSON document, indented, flushed."""
    print_line(_json(document, indent=JSON_INDENT))


def print_compact(document: object) -> None:
    """Print one JSON document on a line: for long lists of numbers, which nobody reads."""
    print_line(_json(document, separators=(",", ":")))


def print_event(event: msgspec.Struct) -> None:
    """Print one event on a line of its own, flushed; `request` only where it is about one of several, `replaced`,
    `cached_tokens`, `checkpoint_bytes` and `choices` only where there is something to say."""
    document = _builtins(event)
    document.pop("replaced_for_log", None)
    for key in ("replaced", "cached_tokens", "checkpoint_bytes", "choices"):
        if not document.get(key, "-"):
            del document[key]
    if document.get("request", 0) is None:
        del document["request"]
    print_line(_json(document, separators=(",", ":")))


def _builtins(thing: object) -> Any:
    import msgspec

    return msgspec.to_builtins(thing)


def _json(thing: object, **style: Any) -> str:
    import json

    return escape_json(json.dumps(_builtins(thing), ensure_ascii=False, **style))


def print_line(text: str) -> None:
    """Print lines of ours and a newline, flushed; names in them steer no terminal."""
    print_text(escape(text, keep_lines=True) + "\n")


def print_text(text: str) -> None:
    """Print text as it is, flushed.

    Raises:
        BrokenPipeError: when the reader has gone.
        OutputError: when it cannot be written for another reason.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"Could not write to standard output: {error.strerror or error}.") from error


def say(sentence: str, *, end: str = "\n", over: bool = False) -> None:
    """Write to standard error, for people: `over` the line that is there. Nobody reads it? No reason to stop."""
    with suppress(OSError):
        sys.stderr.write((_CLEAR_LINE if over else "") + escape(sentence, keep_lines=True) + end)
        sys.stderr.flush()


def check_text(text: str, what: str) -> None:
    """Refuse what a command line has that is no text.

    Raises:
        ArgumentError: for what is not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{what} is not UTF-8 text; give it in UTF-8.") from None


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
        say(f"layerdeck-cli: {error.summary()}")
