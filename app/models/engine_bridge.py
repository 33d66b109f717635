"""Events of a model's session as typed Qt signals in the GUI thread."""

from __future__ import annotations

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

    Events that arrive in the session's thread are emitted in the GUI thread, in the same order.
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

    _arrived = Signal(object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        # Queued explicitly: the session's thread emits this signal, and receivers must run in the GUI thread.
        self._arrived.connect(self._on_arrived, Qt.ConnectionType.QueuedConnection)
        self.session = ModelSession(self._arrived.emit, holders=memory_holders, sequences=saved_states_path())
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

    def _on_arrived(self, news: SessionUpdate) -> None:
        if isinstance(news, DeviceMemoryReadings):
            self.device_memory.emit(news.readings)
        elif isinstance(news, ComputingNeed):
            self.need_found.emit(news)
        else:
            self._signals[type(news)].emit(news)
