"""The bundle that these tests use: made by `python3 make.py bundle`, they say so where it is not there.

With LAYERDECK_TESTED_BUNDLE in the environment it is the one in that folder, as after unpacking a tarball elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.selection import BUNDLE_VARIABLE


@pytest.fixture(scope="session")
def dist() -> Path:
    """Return the folder with what was made."""
    bundle = Path(os.environ[BUNDLE_VARIABLE])
    if not (bundle / "layerdeck").exists():
        pytest.fail("There is no bundle: `python3 make.py bundle` makes it.")
    return bundle.parent


@pytest.fixture
def bundle(dist: Path, tmp_path: Path) -> Path:
    """Return the bundle seen through a path with spaces and letters beyond ASCII."""
    place = tmp_path / "Ünï cödé folder"
    place.mkdir()
    (place / "layerdeck").symlink_to(dist / "layerdeck")
    return place / "layerdeck"
