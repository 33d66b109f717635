"""The bundle that these tests use: made by `python3 make.py bundle`, they say so where it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

DIST = Path(__file__).resolve().parents[2] / "dist"


@pytest.fixture(scope="session")
def dist() -> Path:
    """Return the folder with what was made."""
    if not (DIST / "layerdeck" / "layerdeck").exists():
        pytest.fail("There is no bundle: `python3 make.py bundle` makes it.")
    return DIST


@pytest.fixture
def bundle(dist: Path, tmp_path: Path) -> Path:
    """Return the bundle seen through a path with spaces and letters beyond ASCII."""
    place = tmp_path / "Ünï cödé folder"
    place.mkdir()
    (place / "layerdeck").symlink_to(dist / "layerdeck")
    return place / "layerdeck"
