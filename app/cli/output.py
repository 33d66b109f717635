"""Output of the command line: JSON documents, events, text and errors.

The module also checks text options and the path of --out.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

from engine.base.errors import ArgumentError, EngineError, RuleViolationError
from engine.base.texts import escape, escape_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import msgspec

JSON_INDENT = 2
# Carriage return, and the ANSI sequence EL: erase to the end of the line.
_CLEAR_LINE = "\r\x1b[K"


class OutputError(ArgumentError):
    """Standard output cannot be written, for example because the disk is full, so nothing more can be printed."""


def prepare_streams() -> None:
    """Set standard output and standard error to UTF-8 in every locale."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # File names may be any bytes: Python has those that are not UTF-8 as lone surrogates.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def silence_stdout() -> None:
    """Discard unwritten output, so that the interpreter does not fail again when it flushes standard output at exit."""
    # The descriptor is replaced, not `sys.stdout`: the interpreter flushes the original stream at its end.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def print_document(document: object) -> None:
    """Print `document` as indented JSON, and flush."""
    print_line(_json(document, indent=JSON_INDENT))


def print_compact(document: object) -> None:
    """Print `document` as JSON on one line, for long lists of numbers, and flush."""
    print_line(_json(document, separators=(",", ":")))


def print_event(event: msgspec.Struct) -> None:
    """Print one event as JSON on one line, and flush.

    `request` is left out if it is None. `replaced`, `cached_tokens`, `checkpoint_bytes`, `dropped_tokens`, `draft` and
    `choices` are left out if they are empty.
    """
    document = _builtins(event)
    # For the window and the API server; the contract does not have them.
    document.pop("replaced_for_log", None)
    document.pop("context_used", None)
    document.pop("stop_text", None)
    for key in ("replaced", "cached_tokens", "checkpoint_bytes", "dropped_tokens", "choices", "draft"):
        # The default stands for "not empty": an absent field cannot be deleted.
        if not document.get(key, "-"):
            del document[key]
    if document.get("request", 0) is None:
        del document["request"]
    print_line(_json(document, separators=(",", ":")))


def _builtins(thing: object) -> Any:
    # Imported late: help and most errors need no package.
    import msgspec

    return msgspec.to_builtins(thing)


def _json(thing: object, **style: Any) -> str:
    import json

    return escape_json(json.dumps(_builtins(thing), ensure_ascii=False, **style))


def print_line(text: str) -> None:
    """Print text and a newline, with control characters escaped, and flush."""
    print_text(escape(text, keep_lines=True) + "\n")


def print_text(text: str) -> None:
    """Print text unchanged, and flush.

    Raises:
        BrokenPipeError: if the reader has closed the pipe.
        OutputError: if it cannot be written for another reason.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    # A subclass of `OSError`, but no failure: `| head` ends a command in this way.
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"Could not write to standard output: {error.strerror or error}.") from error


def print_stderr(sentence: str, *, end: str = "\n", over: bool = False) -> None:
    """Print a sentence to standard error; errors of writing are ignored.

    `end`: text after the sentence. `over`: whether the sentence replaces the current line of the terminal.
    """
    # If standard error is closed, nobody can be told.
    with suppress(OSError):
        sys.stderr.write((_CLEAR_LINE if over else "") + escape(sentence, keep_lines=True) + end)
        sys.stderr.flush()


def print_notice(sentence: str, *, over: bool = False) -> None:
    """Print a sentence to standard error, with the name of the program before it. `over`: as in `print_stderr`."""
    print_stderr(f"layerdeck-cli: {sentence}", over=over)


def check_text(text: str, what: str) -> None:
    """Raise an error if `text` of the command line is not valid UTF-8. `what`: subject of the error's sentence.

    Raises:
        ArgumentError: if `text` is not valid UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{what} is not valid UTF-8.") from None


def check_out(path: Path | None) -> None:
    """Raise an error if the path of --out cannot be a file. Called before the work for that file, which takes minutes.

    `path`: value of --out; None if the option is not given.

    Raises:
        ArgumentError: if `path` is a folder, or its folder does not exist.
    """
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ArgumentError(f"--out {path} is no file in an existing folder; choose another place.")


def error_of(write: Callable[[], None]) -> EngineError | None:
    """Call `write`, which saves the results of a command, and return its error, or None.

    The caller prints the results first and then reports the error, so that minutes of work are not lost.
    """
    try:
        write()
    except EngineError as error:
        return error
    return None


def error_document(error: EngineError) -> dict[str, object]:
    """Return the JSON document for `error`, as docs/contract.md defines it."""
    fields: dict[str, object] = {"kind": error.kind, "message": error.summary(), **error.fields()}
    if isinstance(error, RuleViolationError):
        fields["violations"] = [
            {"rule": rule, "message": message, "remedy": remedy} for rule, message, remedy in error.violations
        ]
    return {"error": fields}


def report_error(error: EngineError, *, as_json: bool) -> None:
    """Print `error`: as the only JSON document on standard output, or as a sentence on standard error."""
    if as_json:
        print_document(error_document(error))
    else:
        print_notice(error.summary())
