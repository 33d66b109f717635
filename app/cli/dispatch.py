"""From the words of a command line to a command, and from what it raises to an error document and an exit code.

Only the command that runs is imported: some need next to nothing, others most of the engine.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from app.cli import exit_codes
from app.cli.arguments import LATER_COMMANDS, make_parser
from app.cli.output import OutputError, prepare_streams, print_document, report_error, silence_stdout
from engine.errors import ArgumentError, EngineError


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an interrupt passes through."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    prepare_streams()
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
        import traceback

        traceback.print_exc()
        if as_json:
            print_document({"error": {"kind": "internal", "message": f"A bug in Layerdeck: {error!r}"}})
        return exit_codes.INTERNAL


def _run(words: list[str]) -> int:
    command = words[0] if words else ""
    if command in LATER_COMMANDS and not {"-h", "--help"} & set(words):
        raise ArgumentError(f"`{command}` is not available yet; use plan, load or the window.")
    options = make_parser(words).parse_args(words)
    _quieten_logs()
    return _run_command(options)


def _quieten_logs() -> None:
    """Bug reports print a traceback; the engine's own chatter is for the log file of the window."""
    import logging

    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    logging.getLogger("layerdeck").setLevel(logging.CRITICAL)


def _run_command(options: Namespace) -> int:  # noqa: PLR0912 - a branch for each command
    match options.command:
        case "inspect":
            from app.cli.inspect import run_inspect as run_command
        case "devices":
            from app.cli.devices import run_devices as run_command
        case "plan":
            from app.cli.plan import run_plan as run_command
        case "load":
            from app.cli.load import run_load as run_command
        case "chat":
            from app.cli.chat import run_chat as run_command
        case "embed":
            from app.cli.embed import run_embed as run_command
        case "search":
            from app.cli.search import run_search as run_command
        case "fit":
            from app.cli.fit import run_fit as run_command
        case "download":
            from app.cli.download import run_download as run_command
        case "library":
            from app.cli.library import run_library as run_command
        case "rig":
            from app.cli.rig import run_rig as run_command
        case "demo":
            from app.cli.demo import run_demo as run_command
        case unknown:
            raise AssertionError(f"the parser let {unknown} through")
    return run_command(options)
