"""What a runner shows: its state, the generation that has the model, and news for those who asked for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from engine.errors import ArgumentError
from engine.runner.events import AnyEvent
from engine.runner.protocol import DeviceMemoryReading
from engine.runner.runs import GenerationRun, RunnerState

_T = TypeVar("_T")
_log = logging.getLogger("layerdeck.engine")


@dataclass(frozen=True, slots=True)
class Receivers:
    """Who is told what, in the runner's thread. Their exceptions are logged and go no further."""

    event: Callable[[AnyEvent], None]
    state: Callable[[RunnerState], None] | None = None
    device_memory: Callable[[tuple[DeviceMemoryReading, ...]], None] | None = None

    def tell(self, event: AnyEvent) -> None:
        _tell(self.event, event)

    def tell_state(self, state: RunnerState) -> None:
        if self.state is not None:
            _tell(self.state, state)

    def tell_device_memory(self, readings: tuple[DeviceMemoryReading, ...]) -> None:
        if self.device_memory is not None:
            _tell(self.device_memory, readings)


class Board:
    """State and generation change together, under a lock: a caller takes the loaded model in its own thread.

    `state` and `begin_generation` are for any thread, all else is for the runner's.
    """

    def __init__(self, receivers: Receivers) -> None:
        self._receivers = receivers
        self._lock = threading.Lock()
        self._state = RunnerState.STOPPED
        self._generation: GenerationRun | None = None

    @property
    def state(self) -> RunnerState:
        with self._lock:
            return self._state

    @property
    def generation(self) -> GenerationRun | None:
        """What has begun and not ended. Waits for a beginning under way: what `put` handed on may already run."""
        with self._lock:
            return self._generation

    def begin_generation(self, put: Callable[[GenerationRun], bool]) -> None:
        """Take the model for a generation that `put` hands on, False if nobody takes it any more.

        Raises:
            ArgumentError: when the model is not ready; then nothing has begun.
        """
        with self._lock:
            if self._state is RunnerState.GENERATING:
                raise ArgumentError("An answer is being written; stop it first.")
            generation = GenerationRun()
            if self._state is not RunnerState.READY or not put(generation):
                raise ArgumentError("No model is loaded; load one first.")
            self._generation = generation
            self._state = RunnerState.GENERATING

    def end_generation(self, state: RunnerState) -> None:
        """Give the model back and go to `state`."""
        with self._lock:
            self._generation = None
            self._state = state
        self.tell_state(state)

    def set_state(self, state: RunnerState) -> None:
        """Go to `state` and tell it, if it is another one."""
        with self._lock:
            changed, self._state = self._state is not state, state
        if changed:
            self.tell_state(state)

    def claim(self, state: RunnerState) -> bool:
        """Leave READY for `state`, unless a caller has just taken the model for a generation."""
        with self._lock:
            if self._generation is not None:
                return False
            self._state = state
        self.tell_state(state)
        return True

    def tell_state(self, state: RunnerState) -> None:
        self._receivers.tell_state(state)

    def tell(self, event: AnyEvent) -> None:
        self._receivers.tell(event)

    def tell_device_memory(self, readings: tuple[DeviceMemoryReading, ...]) -> None:
        self._receivers.tell_device_memory(readings)


def _tell(receiver: Callable[[_T], None], value: _T) -> None:
    try:
        receiver(value)
    except Exception:
        _log.exception("a receiver of the runner's news failed")
