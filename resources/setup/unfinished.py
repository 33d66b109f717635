"""A marker file that exists while something is being written. If a later run finds it, the writing was interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def being_written(mark: Path) -> Iterator[None]:
    """Keep the file `mark` while the block runs. Only an interrupt or a kill leaves it; an `Exception` removes it."""
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    try:
        yield
    except Exception:
        mark.unlink(missing_ok=True)
        raise
    mark.unlink(missing_ok=True)
