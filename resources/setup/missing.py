"""Checks for requirements that the set-up cannot install itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NEEDED_BYTES = 1_000_000_000
"""Free disk space that a set-up needs: 420 MB for .venv, the rest during the build."""
COMPILERS = {"darwin": "run xcode-select --install", "win32": "install the Visual Studio Build Tools with C++"}
"""How to install a C++ compiler, by `sys.platform`."""


def compiler_remedy(system: str) -> str:
    """Return how to install a C++ compiler. `system`: as `sys.platform`."""
    return COMPILERS.get(system, "install g++ or clang++")


@dataclass(frozen=True)
class Missing:
    """A missing requirement, and how to get it."""

    what: str
    remedy: str


def find_missing(
    system: str,
    backend: str,
    *,
    has_compiler: bool,
    has_venv: bool,
    free_bytes: int,
    which: Callable[[str], str | None] = shutil.which,
) -> list[Missing]:
    """Return all missing requirements, so that they can be reported at once."""
    missing = []
    if not has_compiler:
        missing.append(Missing("a C++ compiler", compiler_remedy(system)))
    if not has_venv:
        missing.append(Missing("Python's module ensurepip", "install Python's venv package, or uv"))
    if backend == "hip" and which("hipcc") is None:
        missing.append(Missing("hipcc, for LAYERDECK_BACKEND=hip", "install ROCm, with its bin folder on the path"))
    if free_bytes < NEEDED_BYTES:
        room = f"room on the disk ({free_bytes // 10**6} MB are free, {NEEDED_BYTES // 10**6} MB are needed)"
        missing.append(Missing(room, "free some, or clone to another disk"))
    return missing


def sentence(missing: Sequence[Missing]) -> str:
    """Return the message for people: a line for each missing requirement."""
    lines = [f"  {each.what}: {each.remedy}" for each in missing]
    return "\n".join(["These are missing, and nothing was built yet:", *lines, "Then start again."])
