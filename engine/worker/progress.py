"""Tells the parent how a load comes along, also where the engine says nothing for a long time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from engine.runner.protocol import LoadStage, Message, StageProgress

TICK_SECONDS = 1.0
MIN_STEP = 0.01
MIN_STEP_SECONDS = 0.05

CPU_SECONDS = 0.02
MEMORY_BYTES = 1 << 20
READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Effort:
    """What the process has used so far. Growth beyond what the ticking itself takes is a sign of work."""

    cpu_seconds: float
    resident_bytes: int
    read_bytes: int

    def beyond(self, earlier: Effort) -> bool:
        return (
            self.cpu_seconds - earlier.cpu_seconds >= CPU_SECONDS
            or abs(self.resident_bytes - earlier.resident_bytes) >= MEMORY_BYTES
            or self.read_bytes - earlier.read_bytes >= READ_BYTES
        )


def current_effort() -> Effort:
    """Read this process's counters; on systems without /proc only the processor time is known."""
    return Effort(time.process_time(), _resident_bytes(), _read_bytes())


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _read_bytes() -> int:
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "read_bytes:")))
    except (OSError, ValueError, IndexError):
        return 0


class StageReporter:
    """The stage a load is in, sent when it changes and repeated every second while the process visibly works.

    A disk or a server that does not answer leaves no trace in the counters, so the ticks end and the parent's
    stall timeout runs. Use as a context manager: the ticking thread ends with it.
    """

    def __init__(self, send: Callable[[Message], None], *, tick_seconds: float = TICK_SECONDS) -> None:
        self._say = send
        self._tick_seconds = tick_seconds
        self._lock = threading.Lock()
        self._latest = StageProgress(stage="allocate")
        self._sent_at = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="progress", daemon=True)

    @property
    def stage(self) -> LoadStage:
        return self._latest.stage

    def __enter__(self) -> StageReporter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def enter(self, stage: LoadStage, fraction: float | None = None) -> None:
        """Begin a stage."""
        self._send(StageProgress(stage=stage, fraction=fraction))

    def advance(self, fraction: float) -> None:
        """Tell how much of the stage is done, 0..1; small steps in quick succession are left out."""
        before = self._latest.fraction or 0.0
        soon = time.monotonic() - self._sent_at < MIN_STEP_SECONDS
        if fraction >= 1.0 or (fraction - before >= MIN_STEP and not soon):
            self._send(StageProgress(stage=self._latest.stage, fraction=fraction, device=self._latest.device))

    def name_device(self, device: str) -> None:
        """Tell that the stage is at work on a device (our id)."""
        if device != self._latest.device:
            self._send(StageProgress(stage=self._latest.stage, fraction=self._latest.fraction, device=device))

    def say_last(self, message: Message) -> None:
        """Send the message that ends the load, from within a native call that will not return."""
        with self._lock:
            self._say(message)

    def _send(self, progress: StageProgress) -> None:
        with self._lock:
            self._latest = progress
            self._sent_at = time.monotonic()
            self._say(progress)

    def _tick(self) -> None:
        effort = current_effort()
        while not self._ended.wait(self._tick_seconds):
            now = current_effort()
            if now.beyond(effort) and time.monotonic() - self._sent_at >= self._tick_seconds / 2:
                with self._lock:
                    self._say(self._latest)
            effort = now
