"""From the words of a command line to a command, and from what it raises to an error document and an exit code."""

from __future__ import annotations

import logging
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence

from app.cli import commands, exit_codes, load, rig
from app.cli.arguments import LATER_COMMANDS, make_parser
from app.cli.output import OutputError, prepare_streams, print_document, report_error, silence_stdout
from engine.errors import ArgumentError, EngineError

_COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "inspect": commands.run_inspect,
    "devices": commands.run_devices,
    "plan": commands.run_plan,
    "demo": commands.run_demo,
    "load": load.run_load,
    "rig": rig.run_rig,
}


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an interrupt passes through."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    prepare_streams()
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    # Bug reports print a traceback; the engine's own chatter is for the log file of the window.
    logging.getLogger("layerdeck").setLevel(logging.CRITICAL)
    try:
        return _run_to_exit_code(words, as_json=as_json)
    except BrokenPipeError:
        silence_stdout()  # The reader has gone, which is how `| head` ends a command.
        return exit_codes.OK
    except OutputError as error:
        silence_stdout()
        report_error(error, as_json=False)
        return exit_codes.exit_code(error.kind)


def _run_to_exit_code(words: list[str], *, as_json: bool) -> int:
    try:
        return _run(words)
    except (BrokenPipeError, OutputError):
        raise
    except EngineError as error:
        report_error(error, as_json=as_json)
        return exit_codes.exit_code(error.kind)
    except Exception as error:
        traceback.print_exc()
        if as_json:
            print_document({"error": {"kind": "internal", "message": f"A bug in Layerdeck: {error!r}"}})
        return exit_codes.INTERNAL


def _run(words: list[str]) -> int:
    command = words[0] if words else ""
    if command in LATER_COMMANDS and not {"-h", "--help"} & set(words):
        raise ArgumentError(f"`{command}` is not available yet; use plan, load or the window.")
    options = make_parser().parse_args(words)
    return _COMMANDS[options.command](options)
