"""The library at one moment, and how often it is made anew while more is learnt."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from engine.library.listed import Listed

TELL_EVERY_S = 0.5
"""Headers and forecasts arrive by the hundred: the list is made anew this often at most."""
_LARGE = 2000
_TELL_LARGE_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Shelf:
    """The library at one moment. `problems`: what could not be looked into. `aside`: an index that was not usable.
    `is_looked`: the stores were looked into since the window was opened."""

    models: tuple[Listed, ...] = ()
    folders: tuple[Path, ...] = ()
    problems: tuple[str, ...] = ()
    n_files: int = 0
    aside: str = ""
    is_looked: bool = False


class Pace:
    """Says when it is time to tell of progress again."""

    def __init__(self, n_files: int) -> None:
        self._every_s = TELL_EVERY_S if n_files < _LARGE else _TELL_LARGE_EVERY_S
        self._last_s = time.monotonic()

    def is_due(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._last_s < self._every_s:
            return False
        self._last_s = now_s
        return True
