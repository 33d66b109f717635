"""Shows the progress of a long build."""

from __future__ import annotations

import re
import time
from typing import IO

from resources.setup.times import format_duration

REPORT_INTERVAL_S = 15.0


class Progress:
    """Prints the progress of a build: one rewritten line on a terminal, otherwise a line every 15 seconds."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._started_s = time.monotonic()
        self._said_s = self._started_s
        self._state = "preparing"

    def see(self, line: str) -> None:
        """Read the progress from a line of the build's output."""
        if match := re.search(r"\[\s*(\d+)/(\d+)\]", line):
            self._state = f"{match.group(1)} of {match.group(2)} steps"
        elif match := re.search(r"\[\s*(\d+)%\]", line):
            self._state = f"{match.group(1)} %"

    def tick(self) -> None:
        """Print the progress if it is due."""
        now_s = time.monotonic()
        text = f"  llama.cpp: {self._state}, {format_duration(now_s - self._started_s)}"
        if self._out.isatty():
            self._out.write(f"\r{text:<70}")
        elif now_s - self._said_s >= REPORT_INTERVAL_S:
            self._said_s = now_s
            self._out.write(f"{text}\n")
        self._out.flush()

    def end(self) -> None:
        """End the line on the terminal."""
        if self._out.isatty():
            self._out.write("\n")
