"""Paths of the clone, of its virtual environment, and of the user's cache folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
UNFINISHED = ROOT / "build" / "venv-unfinished"
"""Exists while .venv is being written. It is outside of .venv, so that clearing .venv does not remove it."""
FOLDERS = ("app", "benchmarks", "engine", "resources", "tests", "widgets")


def venv_program(name: str) -> Path:
    """Return the path of a program in the virtual environment."""
    return VENV / "Scripts" / f"{name}.exe" if sys.platform == "win32" else VENV / "bin" / name


def cache_folder(system: str, environ: Mapping[str, str], home: Path) -> Path:
    """Return the user's cache folder for Layerdeck, by the rules of the system."""
    if system == "win32":
        base = Path(environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif system == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "layerdeck"


def model_folder(system: str, environ: Mapping[str, str], home: Path) -> Path:
    """Return the folder in which the window looks for the demo model; on Windows a subfolder of the cache folder."""
    base = cache_folder(system, environ, home)
    return (base / "Cache" if system == "win32" else base) / "models"


def wheel_in(folder: Path) -> Path | None:
    """Return the wheel in a folder, None if there is none."""
    return next(iter(sorted(folder.glob("*.whl"))), None)
