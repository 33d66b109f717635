"""A mark for what is being written: where it is found later, that was killed in the middle, and is made anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def being_written(mark: Path) -> Iterator[None]:
    """Keep the file `mark` while the block runs. An interrupt or a kill leaves it; a step that failed has ended."""
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    try:
        yield
    except Exception:
        mark.unlink(missing_ok=True)
        raise
    mark.unlink(missing_ok=True)
