"""Exit codes of the command line (docs/contract.md, section Exit codes)."""

from __future__ import annotations

OK = 0
INTERNAL = 1
ARGUMENT = 2
DOES_NOT_FIT = 3
MODEL_FILE = 4
CRASHED = 5
UNREACHABLE = 6
# 128 + SIGINT (2), as shells report it.
INTERRUPTED = 130

_BY_KIND = {
    "argument": ARGUMENT,
    "layout": ARGUMENT,
    "rig": ARGUMENT,
    "storage": ARGUMENT,
    "changed": ARGUMENT,
    "does_not_fit": DOES_NOT_FIT,
    "model_file": MODEL_FILE,
    "crashed": CRASHED,
    "stalled": CRASHED,
    "unreachable": UNREACHABLE,
    "busy": UNREACHABLE,
    "cancelled": INTERRUPTED,
}


def exit_code(kind: str) -> int:
    """Return the exit code for an error of this `kind`; `INTERNAL` for an unknown kind, which is a bug."""
    return _BY_KIND.get(kind, INTERNAL)
