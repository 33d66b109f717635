"""Builds a stand-in for NVIDIA's library NVML, and runs Python with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml_stub.c")
LIBRARY_NAME = "libnvidia-ml.so.1"
REPOSITORY = Path(__file__).parents[2]


def build_nvml_stub(folder: Path) -> Path:
    """Compile the stand-in into `folder`; return its path."""
    library = folder / LIBRARY_NAME
    compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, SOURCE], check=True, timeout=60)
    return library


def run_with_nvml(library: Path | None, script: str, *, mode: str = "") -> str:
    """Run a Python script in a child that loads `library` as NVML, or none if it is None; return its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NVML_STUB")}
    environment |= {"NVML_STUB_MODE": mode, "PYTHONPATH": str(REPOSITORY)}
    if library is not None:
        environment["LD_LIBRARY_PATH"] = str(library.parent)
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=environment,
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return run.stdout
