"""The programs that run as child processes. The bundle has a single executable; an argument selects the program."""

from __future__ import annotations

import sys

LOG_PREFIX = "layerdeck log: "
"""Prefix of a worker's log messages on its standard error.

A worker has no log file of its own, so the parent process writes the lines with this prefix to its log.
"""

CHILDREN = {
    "worker": "engine.runtime.child",
    "renderer": "engine.runtime.child.generate.renderer",
    "download": "engine.library.downloads",
    "pdf": "engine.chat.pdf_reader",
    "image": "engine.runtime.media.images.pictures",
    "sound": "engine.runtime.media.sounds.recordings",
    "importer": "engine.chat.importer",
    "library": "engine.library.children",
    "tunnel": "engine.machines.tunnel",
    "formula": "engine.runtime.media.images.formula",
}
"""Python module of each child program, by the program's name.

The bundled executable runs this module if it is started with the argument `--NAME` (`app.program`).
"""


def child_argv(child: str, *words: str) -> list[str]:
    """Return the command that runs one of `CHILDREN` with `words` as its arguments."""
    if getattr(sys, "frozen", False):
        return [sys.executable, f"--{child}", *words]
    # -P: the folder we were started in is not ours, and what lies there must not pass for a module
    return [sys.executable, "-P", "-m", CHILDREN[child], *words]
