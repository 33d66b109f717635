"""Which file a model is: the same one under another name is the same model, one written anew is another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelFileError
from engine.language import tr


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Device, number, size and time of change (ns) of each part's file. `copy`: the same file may be open several
    times, each with a layout of its own; the first one is 0."""

    parts: tuple[tuple[int, int, int, int], ...]
    copy: int = 0


def identify(paths: Sequence[Path]) -> FileIdentity:
    """Return which files `paths` are now.

    Raises:
        ModelFileError: when one of them cannot be looked at.
    """
    return FileIdentity(tuple(map(_identify, paths)))


def _identify(path: Path) -> tuple[int, int, int, int]:
    try:
        state = path.stat()
    except OSError as error:
        raise ModelFileError(
            path, tr("{strerror}; check that it is still there", strerror=error.strerror or error)
        ) from error
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
