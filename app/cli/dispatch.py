"""From the words of a command line to a command, and from what it raises to an error document and an exit code.

Only the command that runs is imported: some need next to nothing, others most of the engine.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

from app.cli import exit_codes
from app.cli.arguments import make_parser
from app.cli.command_tunnels import CommandTunnels
from app.cli.output import OutputError, prepare_streams, print_document, report_error, say, silence_stdout
from app.surroundings import settle_places
from engine.errors import EngineError

WITHOUT_CHILDREN = frozenset({"inspect"})
"""Commands that start no child of the engine, and are to cost next to nothing."""


LOGGED = frozenset({"load", "chat", "embed"})
"""Commands of which the log says how their children ended."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an interrupt passes through."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    prepare_streams()
    if aside := settle_places(os.environ):
        say(aside)
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
    options = make_parser(words).parse_args(words)
    _quieten_logs()
    return _run_command(options)


def _quieten_logs() -> None:
    """Bug reports print a traceback; the engine's own chatter is for the log file of the window."""
    import logging

    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    logging.getLogger("layerdeck").setLevel(logging.CRITICAL)


def _run_command(options: Namespace) -> int:
    """Run the command that the parser let through: each has a module of its name, with `run_NAME`."""
    name = options.command
    if name not in WITHOUT_CHILDREN:
        from app.packs import use_packs

        use_packs()
    run_command: Callable[[Namespace], int] = getattr(import_module(f"app.cli.{name}"), f"run_{name}")
    with _log(name), CommandTunnels() as options.tunnels:
        return run_command(options)


def _log(command: str) -> AbstractContextManager[None]:
    if command not in LOGGED:
        return nullcontext()
    from app.log_file import command_log
    from app.paths import command_log_path

    return command_log(command_log_path())
