"""The stamp that a finished set-up writes into .venv, and whether it is up to date."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from resources.setup.demo_model import DEMO_WHEEL_SHA256
from resources.setup.places import VENV

STAMP = VENV / "layerdeck-setup.json"


def read_stamp() -> dict[str, str]:
    """Return the content of the stamp; empty if no set-up was finished."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in stamp.items()} if isinstance(stamp, dict) else {}


def setup_digest(
    pyproject: bytes, place: Path, python: str, backend: str, cmake_args: str, switches: Sequence[str]
) -> str:
    """Return a digest of the inputs of a set-up, as far as they are known without starting a program.

    `switches`: compiler switches that disable features (`amx_switches`); an engine built without them is outdated.
    """
    inputs = [pyproject.decode(), str(place), python, backend, cmake_args, DEMO_WHEEL_SHA256, *switches]
    return hashlib.sha256("\0".join(inputs).encode()).hexdigest()


def is_set_up(stamp: Mapping[str, str], digest: str, *, tests: bool) -> bool:
    """Return whether the set-up of this stamp is up to date. `tests`: whether the packages for tests are needed."""
    return stamp.get("digest") == digest and (not tests or stamp.get("tests") == "yes")
