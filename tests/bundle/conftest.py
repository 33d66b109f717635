"""The bundle under test, made by `python3 make.py bundle`. Without it the tests fail with that command.

LAYERDECK_TESTED_BUNDLE names another folder with a bundle, such as an unpacked tarball.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
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


@pytest.fixture(scope="session")
def bundle(dist: Path) -> Iterator[Path]:
    """Return the bundle where nobody can write, in a path with spaces, letters beyond ASCII and signs."""
    with tempfile.TemporaryDirectory(prefix="layerdeck-bundle-") as place:
        Path(place).chmod(0o755)  # for another user
        copy = Path(place, "Ünï cödé a&b %f folder", "layerdeck")
        copy.parent.mkdir()
        # The same files in folders of their own, unless it lies on another disk.
        linked = subprocess.run(["cp", "-al", str(dist / "layerdeck"), str(copy)], capture_output=True, check=False)
        if linked.returncode != 0:
            shutil.rmtree(copy, ignore_errors=True)
            subprocess.run(["cp", "-a", str(dist / "layerdeck"), str(copy)], check=True)
        set_modes(copy.parent, 0o555)
        yield copy
        set_modes(copy.parent, 0o755)


def set_modes(folder: Path, mode: int) -> None:
    """Give `folder` and all folders in it a mode."""
    for path, _, _ in os.walk(folder):
        Path(path).chmod(mode)
