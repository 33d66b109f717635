"""Entry point of `layerdeck-cli`: dispatch, error documents and exit codes."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence

from app.cli import commands, exit_codes, load, rig
from app.cli.arguments import LATER_COMMANDS, make_parser
from app.cli.output import print_document, report_error
from engine.errors import ArgumentError, EngineError

_COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "inspect": commands.run_inspect,
    "devices": commands.run_devices,
    "plan": commands.run_plan,
    "demo": commands.run_demo,
    "load": load.run_load,
    "rig": rig.run_rig,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    # Bug reports print a traceback; the engine's own chatter is for the log file of the window.
    logging.getLogger("layerdeck").setLevel(logging.CRITICAL)
    try:
        return _run(words)
    except EngineError as error:
        report_error(error, as_json=as_json)
        return exit_codes.exit_code(error.kind)
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except BrokenPipeError:
        # The reader has gone; keep the interpreter from failing again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.OK
    except Exception as error:
        traceback.print_exc()
        if as_json:
            print_document({"error": {"kind": "internal", "message": f"A bug in Layerdeck: {error!r}"}})
        return exit_codes.INTERNAL


def _run(words: list[str]) -> int:
    options = make_parser().parse_args(words)
    if options.command in LATER_COMMANDS:
        raise ArgumentError(f"`{options.command}` is not available yet; use plan, load or the window.")
    return _COMMANDS[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
