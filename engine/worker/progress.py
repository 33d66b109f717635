"""Tells the parent how a load comes along, also where the engine says nothing for a long time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from engine.protocol.effort import TICK_SECONDS, WorkTicks
from engine.protocol.messages import LoadStage, Message, StageProgress

MIN_STEP = 0.01
MIN_STEP_SECONDS = 0.05


class StageReporter:
    """The stage a load is in, sent when it changes and repeated every second while the process visibly works.

    Use as a context manager: the ticking ends with it.
    """

    def __init__(self, send: Callable[[Message], None], *, tick_seconds: float = TICK_SECONDS) -> None:
        self._say = send
        self._tick_seconds = tick_seconds
        self._lock = threading.Lock()
        self._latest = StageProgress(stage="allocate")
        self._sent_at = 0.0
        self._ticks = WorkTicks(self._repeat, tick_seconds=tick_seconds)

    @property
    def stage(self) -> LoadStage:
        return self._latest.stage

    def __enter__(self) -> StageReporter:
        self._ticks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ticks.__exit__(kind, error, trace)

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

    def _repeat(self) -> None:
        if time.monotonic() - self._sent_at >= self._tick_seconds / 2:
            with self._lock:
                self._say(self._latest)
