"""Build folder of the engine. An interrupted build leaves it, so that the next build reuses its object files.

scikit-build-core lets CMake configure such a folder again, and ninja's log knows which objects are complete. The paths
of the sources must stay the same for that, so the sources are in the folder too.
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
    """Folders of one build. `goes_on`: whether an earlier build left object files there."""

    path: Path
    goes_on: bool

    @property
    def source(self) -> Path:
        """Sources of the engine; need not exist."""
        return self.path / "source"

    @property
    def objects(self) -> Path:
        """CMake's build folder."""
        return self.path / "objects"

    @property
    def temporary(self) -> Path:
        """Temporary files of one run, removed before the next one."""
        return self.path / "temporary"


@contextmanager
def build_folder(parent: Path, key: str) -> Iterator[BuildFolder]:
    """Yield the folder in `parent` for the build `key`; a temporary folder if another process uses it.

    It stays after an interrupt, a kill, or the first failure. It is removed after a success, and after a failure of a
    continued build, since the older objects may be the cause. Folders of other keys are removed unless they are in use.
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
    """Create the folder, with an empty folder for temporary files."""
    shutil.rmtree(folder.temporary, ignore_errors=True)
    folder.temporary.mkdir(parents=True)
    return folder


def _remove_others(parent: Path, own: Path) -> None:
    """Remove the folders of interrupted builds with other keys, unless they are in use."""
    for path in parent.glob(f"{PREFIX}*"):
        if path.is_dir() and path != own:
            with path.with_name(f"{path.name}.lock").open("a+b") as lock:
                if _take(lock):
                    shutil.rmtree(path, ignore_errors=True)


def _take(lock: IO[bytes]) -> bool:
    """Try to lock a file until it is closed or this process ends; return whether it was free."""
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
