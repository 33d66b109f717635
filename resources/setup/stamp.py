"""What a finished set-up noted in .venv, and whether it is the one that is wanted now."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from resources.setup.demo_model import DEMO_WHEEL_SHA256
from resources.setup.places import VENV

STAMP = VENV / "layerdeck-setup.json"


def read_stamp() -> dict[str, str]:
    """Return what the last finished set-up noted, nothing if there was none."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in stamp.items()} if isinstance(stamp, dict) else {}


def setup_digest(
    pyproject: bytes, place: Path, python: str, backend: str, cmake_args: str, switches: Sequence[str]
) -> str:
    """Return a digest of what the virtual environment depends on and can be had without starting a program.

    The `switches` that leave something out of the engine are among it: an engine that was built before we knew is old.
    """
    inputs = [pyproject.decode(), str(place), python, backend, cmake_args, DEMO_WHEEL_SHA256, *switches]
    return hashlib.sha256("\0".join(inputs).encode()).hexdigest()


def is_set_up(stamp: Mapping[str, str], digest: str, *, tests: bool) -> bool:
    """Say whether the set-up that left `stamp` is the one wanted now."""
    return stamp.get("digest") == digest and (not tests or stamp.get("tests") == "yes")
