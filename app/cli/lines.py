"""Lines that a person or a program writes to standard input, without holding up what else goes on."""

from __future__ import annotations

import os
import queue
import threading
from contextlib import suppress

_READ_BYTES = 1 << 16


class LineReader:
    """Reads in a thread of its own, which the end of the program does not wait for."""

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # not through sys.stdin: a thread that waits in there holds a lock that Python wants at its end
        threading.Thread(target=self._run, name="lines", daemon=True).start()

    def next(self, timeout_s: float) -> str | None:
        """Return the next line without its end, None at the end of the input.

        Raises:
            queue.Empty: there is none yet.
        """
        return self._lines.get(timeout=timeout_s)

    def _run(self) -> None:
        held = b""
        with suppress(OSError):
            while data := os.read(self._descriptor, _READ_BYTES):
                *lines, held = (held + data).split(b"\n")
                for line in lines:
                    self._lines.put(_text(line))
        if held:
            self._lines.put(_text(held))
        self._lines.put(None)


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r")
