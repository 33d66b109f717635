"""Output of the set-up, and calls of other programs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from resources.setup.errors import SetupError
from resources.setup.places import ROOT


def say(text: str) -> None:
    """Print a line for the person at the terminal."""
    print(text, flush=True)


def call(command: Sequence[str], failed: str) -> None:
    """Run a command of the set-up.

    Raises:
        SetupError: the command failed. `failed`: the text.
    """
    if subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise SetupError(failed, exit_code=1)


def output_of(command: Sequence[str]) -> str | None:
    """Return the output of `command`; None if it does not exist or fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
