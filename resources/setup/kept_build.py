"""The folder that an engine is built in: kept where a build is stopped, so that the next one goes on from its objects.

scikit-build-core has CMake configure such a folder anew, and ninja's own log says which objects are there and whole.
For that the source has to lie where it lay before, so it is in the folder as well.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PREFIX = "unfinished-"


@dataclass(frozen=True)
class BuildFolder:
    """Where to build: the unpacked `source` (there or not), its `objects`, and what is for this run alone."""

    path: Path
    goes_on: bool

    @property
    def source(self) -> Path:
        """The engine's source."""
        return self.path / "source"

    @property
    def objects(self) -> Path:
        """CMake's folder."""
        return self.path / "objects"

    @property
    def temporary(self) -> Path:
        """Files of this run, removed before the next."""
        return self.path / "temporary"


@contextmanager
def build_folder(parent: Path, key: str) -> Iterator[BuildFolder]:
    """Yield the folder in `parent` for the build that is called `key`; another one where that is in use.

    Left by an interrupt or a kill it stays; after a whole build it goes, and so does one that failed though it went on
    from earlier objects: they may be the cause. What builds of other keys left is removed.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with (parent / f"{PREFIX}{key}.lock").open("a+b") as lock:
        if not _take(lock):
            with tempfile.TemporaryDirectory(prefix="build-", dir=parent) as scratch:
                yield _fresh(BuildFolder(Path(scratch), goes_on=False))
            return
        path = parent / f"{PREFIX}{key}"
        _remove_others(parent, path)
        folder = _fresh(BuildFolder(path, goes_on=(path / "objects").is_dir()))
        try:
            yield folder
        except Exception:
            if folder.goes_on:
                shutil.rmtree(path, ignore_errors=True)
            raise
        shutil.rmtree(path, ignore_errors=True)


def _fresh(folder: BuildFolder) -> BuildFolder:
    """Make the folder, and empty what is for one run."""
    shutil.rmtree(folder.temporary, ignore_errors=True)
    folder.temporary.mkdir(parents=True)
    return folder


def _remove_others(parent: Path, own: Path) -> None:
    """Remove what stopped builds with other options left, but for those that run."""
    for path in parent.glob(f"{PREFIX}*"):
        if path.is_dir() and path != own:
            with path.with_name(f"{path.name}.lock").open("a+b") as lock:
                if _take(lock):
                    shutil.rmtree(path, ignore_errors=True)


def _take(lock: IO[bytes]) -> bool:
    """Lock a file until it is closed, however this process ends; return whether nobody else has it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
