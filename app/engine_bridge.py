"""The runner's events as typed Qt signals in the GUI thread."""

from __future__ import annotations

from PySide6.QtCore import QObject, Qt, Signal

from engine.runner.client import LoadOrder
from engine.runner.events import (
    AnyEvent,
    Attempt,
    Cancelled,
    Crashed,
    Done,
    Failed,
    Loaded,
    OutOfMemory,
    Progress,
    Token,
)
from engine.runner.load_loop import LoadLoop
from engine.runner.protocol import Generate
from engine.telemetry.memory_holders import memory_holders


class EngineBridge(QObject):
    """Owns the runner. Calls return at once; events come from the runner's threads and arrive here queued."""

    progress = Signal(Progress)
    attempt = Signal(Attempt)
    loaded = Signal(Loaded)
    out_of_memory = Signal(OutOfMemory)
    failed = Signal(Failed)
    crashed = Signal(Crashed)
    cancelled = Signal(Cancelled)
    token = Signal(Token)
    done = Signal(Done)
    device_memory = Signal(object)  # tuple[DeviceMemoryReading, ...]

    _arrived = Signal(object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._arrived.connect(self._on_arrived, Qt.ConnectionType.QueuedConnection)
        self.runner = LoadLoop(self._arrived.emit, on_device_memory=self.device_memory.emit, holders=memory_holders)
        self._signals = {
            Progress: self.progress,
            Attempt: self.attempt,
            Loaded: self.loaded,
            OutOfMemory: self.out_of_memory,
            Failed: self.failed,
            Crashed: self.crashed,
            Cancelled: self.cancelled,
            Token: self.token,
            Done: self.done,
        }

    def load(self, order: LoadOrder) -> None:
        self.runner.load(order)

    def generate(self, request: Generate) -> None:
        self.runner.generate(request)

    def stop(self) -> None:
        """End the load or the generation that is running."""
        self.runner.stop()

    def query_device_memory(self) -> None:
        """Ask the loaded model's child what its devices report; `device_memory` brings the answer."""
        self.runner.query_device_memory()

    def unload(self) -> None:
        self.runner.unload()

    def close(self) -> None:
        """End the child, waiting a bounded time."""
        self.runner.close()

    def _on_arrived(self, event: AnyEvent) -> None:
        self._signals[type(event)].emit(event)
