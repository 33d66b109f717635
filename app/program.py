"""Entry point of the bundle: window, command line and child processes are one executable.

- `layerdeck [FILE.gguf]`: the window
- `layerdeck-cli WORDS`: the command line (the same executable under another name), also as `layerdeck --cli WORDS`
- `layerdeck --NAME WORDS`: a child process; NAME is a key in `CHILDREN` of `engine.base.programs`, such as `worker`
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from engine.base.programs import CHILDREN

CLI_NAME = "layerdeck-cli"


def restore_library_path(environ: MutableMapping[str, str]) -> None:
    """Restore LD_LIBRARY_PATH, so that system programs that we start, such as a browser, use the system's libraries.

    PyInstaller's loader sets the variable to the bundle's libraries and stores the old value in LD_LIBRARY_PATH_ORIG.
    This process does not need the variable any more. PYINSTALLER_RESET_ENVIRONMENT makes the loader set it again in our
    children.
    """
    environ["PYINSTALLER_RESET_ENVIRONMENT"] = "1"
    before = environ.pop("LD_LIBRARY_PATH_ORIG", None)
    if before is None:
        environ.pop("LD_LIBRARY_PATH", None)
    else:
        environ["LD_LIBRARY_PATH"] = before


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the window, the command line or a child process, chosen by the arguments and the program's name.

    Returns:
        The exit code.
    """
    program, *words = sys.argv if arguments is None else arguments
    # Set by PyInstaller.
    if getattr(sys, "frozen", False):
        restore_library_path(os.environ)
    match words:
        case [option, *of_child] if option.startswith("--") and (child := CHILDREN.get(option[2:])):
            sys.argv = [program, *of_child]
            # As `python -m` does; the bundle has no Python of its own to start.
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
