"""uv, a faster replacement of venv and pip, used if it is installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from resources.setup.places import ROOT
from resources.setup.steps import say


def find_uv() -> str | None:
    """Return the path of uv; None if it is not installed."""
    return shutil.which("uv")


def try_uv(words: Sequence[str]) -> bool:
    """Run uv with these arguments; return whether it succeeded. False without uv: the caller then uses venv or pip."""
    uv = find_uv()
    if uv is None:
        return False
    done = subprocess.run([uv, "--quiet", *words], cwd=ROOT, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        say("uv could not do that; going on with pip.")
    return done.returncode == 0
