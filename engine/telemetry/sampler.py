"""The thread that takes samples at a steady pace."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from engine.telemetry.sample import Sample

_log = logging.getLogger(__name__)
DEFAULT_INTERVAL_S = 1.0
STOP_TIMEOUT_S = 2.0


class SampleSource(Protocol):
    """Where samples come from; `read` and `close` are called in the sampler's thread."""

    def read(self) -> tuple[Sample, ...]:
        """Return one sample per device."""

    def close(self) -> None:
        """Let go of what reading opened."""


class Sampler:
    """Hands samples to `on_samples`, in its own thread, every `interval_s` seconds from `start` to `stop`."""

    def __init__(
        self,
        source: SampleSource,
        on_samples: Callable[[tuple[Sample, ...]], None],
        interval_s: float = DEFAULT_INTERVAL_S,
    ) -> None:
        self._source = source
        self._on_samples = on_samples
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_failed = False

    def start(self) -> None:
        """Begin; the first samples come at once. A second call does nothing."""
        if self._thread is not None:
            return
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """End the thread; False if a reading hangs and it is still there after `timeout_s`."""
        self._stopping.set()
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        if thread.is_alive():
            return False
        self._thread = None
        return True

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stopping.is_set():
            self._take()
            # A late reading shifts the pace rather than being followed by a burst.
            due_s = max(due_s + self._interval_s, time.monotonic())
            self._stopping.wait(due_s - time.monotonic())
        self._source.close()

    def _take(self) -> None:
        # The thread's outermost edge: graphs that stop would hide the reason.
        try:
            samples = self._source.read()
            if not self._stopping.is_set():
                self._on_samples(samples)
        except Exception:
            if not self._has_failed:
                _log.exception("Reading the devices failed; trying on")
            self._has_failed = True
