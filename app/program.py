"""Entry point of the bundle, where window, command line and children are one executable.

- `layerdeck [FILE.gguf]`: the window
- `layerdeck-cli WORDS`: the command line, the program under another name; `layerdeck --cli WORDS` is the same
- `layerdeck --worker WORDS`: a child, as `engine.base.programs` starts it, and so are the others named there
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from engine.base.programs import CHILDREN

CLI_NAME = "layerdeck-cli"


def give_libraries_back(environ: MutableMapping[str, str]) -> None:
    """Have programs of the system that we start, as a browser, find the system's libraries again and not the bundle's.

    PyInstaller's loader says by LD_LIBRARY_PATH where ours are, which this process has read; what stood there before it
    keeps. Told to begin anew it does the same for each of our children.
    """
    environ["PYINSTALLER_RESET_ENVIRONMENT"] = "1"
    before = environ.pop("LD_LIBRARY_PATH_ORIG", None)
    if before is None:
        environ.pop("LD_LIBRARY_PATH", None)
    else:
        environ["LD_LIBRARY_PATH"] = before


def main(arguments: Sequence[str] | None = None) -> int:
    """Be what the first argument, or the name of the program, says; return the exit code."""
    program, *words = sys.argv if arguments is None else arguments
    if getattr(sys, "frozen", False):
        give_libraries_back(os.environ)
    match words:
        case [option, *of_child] if option.startswith("--") and (child := CHILDREN.get(option[2:])):
            sys.argv = [program, *of_child]
            runpy.run_module(child, run_name="__main__", alter_sys=True)
            return 0
        case ["--cli", *of_command]:
            return _run_command_line(of_command)
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
