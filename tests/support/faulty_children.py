"""Real model children under faults of the system: a disk that stops delivering, and limited memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from engine.runtime.process.system import worker_argv


def build_preload(name: str, folder: Path) -> Path:
    """Compile `NAME.c` of this folder to a library for LD_PRELOAD in `folder`; return its path."""
    library, source = folder / f"lib{name}.so", Path(__file__).with_name(f"{name}.c")
    compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
    command = [compiler, "-O1", "-shared", "-fPIC", "-Wall", "-Werror", str(source), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


def build_slow_disk(folder: Path) -> Path:
    """Compile the library of the slow disk (`slow_disk.c`) into `folder`; return its path."""
    return build_preload("slow_disk", folder)


def with_slow_disk(library: Path, model: Path, after_bytes: int) -> list[str]:
    """Return the command of a model child whose reads of `model` block for ever after `after_bytes`."""
    settings = {"LD_PRELOAD": library, "SLOW_DISK_FILE": model.resolve(), "SLOW_DISK_AFTER": after_bytes}
    return ["env", *(f"{name}={value}" for name, value in settings.items()), *worker_argv()]


def with_limited_memory(limit_bytes: int) -> list[str]:
    """Return the command of a model child with at most `limit_bytes` of data (RLIMIT_DATA)."""
    code = (
        "import os, resource, sys; "
        f"resource.setrlimit(resource.RLIMIT_DATA, ({limit_bytes}, {limit_bytes})); os.execv(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-c", code, *worker_argv()]
