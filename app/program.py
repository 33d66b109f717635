"""Entry point of the bundle, where window, command line and children are one executable.

layerdeck [FILE.gguf]            the window
layerdeck-cli WORDS              the command line (the program under another name)
layerdeck --cli WORDS            the same
layerdeck --worker ROLE          a child, as `engine.process` starts it
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

CLI_NAME = "layerdeck-cli"


def main(arguments: Sequence[str] | None = None) -> int:
    """Be what the first argument, or the name of the program, says; return the exit code."""
    program, *words = sys.argv if arguments is None else arguments
    match words:
        case ["--worker", *_]:
            from engine.worker.__main__ import main as work

            work()
            return 0
        case ["--cli", *words]:
            return _run_command_line(words)
        case _ if Path(program).stem == CLI_NAME:
            return _run_command_line(words)
        case _:
            from app.gui import main as open_window

            return open_window(words)


def _run_command_line(words: Sequence[str]) -> int:
    from app.cli import main as run

    return run(words)


if __name__ == "__main__":
    sys.exit(main())
