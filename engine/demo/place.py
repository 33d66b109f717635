"""Where a demo model is written to: whole or not at all, with a sentence for a place where it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import ArgumentError
from engine.files import replacing


@contextmanager
def placing(path: Path) -> Iterator[Path]:
    """Yield an unfinished file that takes the place of `path` at the end: what is there stays whole until then.

    Raises:
        ArgumentError: when it cannot be written there.
    """
    try:
        if path.is_dir():
            raise ArgumentError(f"{path} is a folder; name the file to write, such as {path / 'demo.gguf'}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            yield unfinished
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"The demo model cannot be written to {path}: {_reason(error)}; choose another place"
        ) from error


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "what should be a folder is a file"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it is not a possible file name"
