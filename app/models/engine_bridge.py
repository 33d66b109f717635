"""Events of a model's session as typed Qt signals in the GUI thread."""

from __future__ import annotations

from collections import deque

from PySide6.QtCore import QObject, Qt, Signal

from app.paths import saved_states_path
from engine.devices.device import ComputingNeed
from engine.devices.telemetry.memory_holders import memory_holders
from engine.runtime.protocol.messages import DeviceMemoryReadings
from engine.runtime.session.driver import SessionUpdate
from engine.runtime.session.events import (
    Answered,
    Attempt,
    Cancelled,
    Crashed,
    Done,
    Failed,
    Fallback,
    Loaded,
    OutOfMemory,
    Progress,
    Reading,
    Saving,
    Shifted,
    Token,
)
from engine.runtime.session.session import ModelSession
from engine.runtime.session.snapshot import Snapshot


class EngineBridge(QObject):
    """Owns the session of one model.

    Events that arrive in the session's thread are emitted in the GUI thread, in the same order. The snapshot and the
    events of one change are emitted together: the event loop handles nothing else between them, so no other object
    sees the new state without, for example, the reason why the model is not loaded any more.
    """

    snapshot = Signal(Snapshot)
    progress = Signal(Progress)
    attempt = Signal(Attempt)
    fell_back = Signal(Fallback)
    loaded = Signal(Loaded)
    out_of_memory = Signal(OutOfMemory)
    failed = Signal(Failed)
    crashed = Signal(Crashed)
    cancelled = Signal(Cancelled)
    reading = Signal(Reading)
    saving = Signal(Saving)
    token = Signal(Token)
    shifted = Signal(Shifted)
    done = Signal(Done)
    answered = Signal(Answered)
    device_memory = Signal(object)  # tuple[DeviceMemoryReading, ...]
    need_found = Signal(object)  # ComputingNeed

    _arrived = Signal(object)  # list[SessionUpdate]

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._collected: list[SessionUpdate] = []
        """Updates of the current change. Only the session's thread uses this list."""
        self._pending: deque[SessionUpdate] = deque()
        # Queued explicitly: the session's thread emits this signal, and receivers must run in the GUI thread.
        self._arrived.connect(self._on_arrived, Qt.ConnectionType.QueuedConnection)
        self.session = ModelSession(
            self._collect, flush=self._flush, holders=memory_holders, sequences=saved_states_path()
        )
        self._signals = {
            Snapshot: self.snapshot,
            Progress: self.progress,
            Attempt: self.attempt,
            Fallback: self.fell_back,
            Loaded: self.loaded,
            OutOfMemory: self.out_of_memory,
            Failed: self.failed,
            Crashed: self.crashed,
            Cancelled: self.cancelled,
            Reading: self.reading,
            Saving: self.saving,
            Token: self.token,
            Shifted: self.shifted,
            Done: self.done,
            Answered: self.answered,
        }

    def close(self) -> None:
        """End the session and its child process, within a bounded time."""
        self.session.close()

    def _collect(self, update: SessionUpdate) -> None:
        self._collected.append(update)

    def _flush(self) -> None:
        if self._collected:
            collected, self._collected = self._collected, []
            self._arrived.emit(collected)

    def _on_arrived(self, updates: list[SessionUpdate]) -> None:
        # A receiver may run an event loop of its own, such as a modal dialog. Updates that arrive there come after
        # those that are still pending here.
        self._pending += updates
        while self._pending:
            self._emit(self._pending.popleft())

    def _emit(self, update: SessionUpdate) -> None:
        if isinstance(update, DeviceMemoryReadings):
            self.device_memory.emit(update.readings)
        elif isinstance(update, ComputingNeed):
            self.need_found.emit(update)
        else:
            self._signals[type(update)].emit(update)
