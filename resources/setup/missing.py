"""What a set-up needs and a machine lacks, where packages cannot be installed from here."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NEEDED_BYTES = 1_000_000_000
"""On the clone's disk: .venv takes 420 MB, the rest is for the build while it runs."""
COMPILERS = {"darwin": "run xcode-select --install", "win32": "install the Visual Studio Build Tools with C++"}
"""How to have one, by system."""


def compiler_remedy(system: str) -> str:
    """Return how to have a compiler on `system` (as `sys.platform` calls it)."""
    return COMPILERS.get(system, "install g++ or clang++")


@dataclass(frozen=True)
class Missing:
    """Something that is not there, with what to do about it."""

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
    """Return all that is missing, so that nobody hears of one thing after another."""
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
    """Return what to tell people: a line each, and that nothing was built."""
    lines = [f"  {each.what}: {each.remedy}" for each in missing]
    return "\n".join(["These are missing, and nothing was built yet:", *lines, "Then start again."])
