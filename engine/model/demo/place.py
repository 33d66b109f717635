"""Writes a demo model's file atomically, and turns errors into a sentence for people."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.base.errors import ArgumentError
from engine.base.files import replacing
from engine.base.language import tr


@contextmanager
def placing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `path` on exit; until then the old file is unchanged.

    Raises:
        ArgumentError: if the file cannot be written.
    """
    try:
        if path.is_dir():
            raise ArgumentError(
                tr(
                    "{path} is a folder; name the file to write, such as {example}",
                    path=path,
                    example=path / "demo.gguf",
                )
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            yield unfinished
    except (OSError, ValueError) as error:
        raise ArgumentError(
            tr(
                "The demo model cannot be written to {path}: {reason}; choose another place",
                path=path,
                reason=_reason(error),
            )
        ) from error


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return tr("part of the path is a file, not a folder")
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return tr("the path is not a valid file name")
