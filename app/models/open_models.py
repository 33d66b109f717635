"""The models that are open: which one is current, and which one's keep-alive is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QObject, QTimer, Signal

from app.models.open_model import OpenModel
from app.rig.calibrator import Calibrator
from engine.model.gguf.model_file import FileIdentity, ModelFile
from engine.planning.fit.loaded_models import HeldModel, expired, next_expiry_s
from engine.runtime.session.status import Phase

_LONGEST_WAIT_MS = 3_600_000
"""A timer's milliseconds are 32 bits; a later expiry is looked at again."""


class OpenModels(QObject):
    """Owns them. There is always a current one, at first without a file."""

    added = Signal(object)  # OpenModel
    current_changed = Signal(object)  # OpenModel
    changed = Signal()
    """One was loaded, unloaded, asked or answered."""
    expired = Signal(object)  # OpenModel: it was unloaded, because nobody asked it anything for long enough

    def __init__(
        self, calibrator: Calibrator, *, clock: Callable[[], float] = time.monotonic, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._calibrator = calibrator
        self._clock = clock
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self.unload_expired)
        self._all: list[OpenModel] = []
        self.current = self._add()

    @property
    def all(self) -> tuple[OpenModel, ...]:
        """All of them, in the order in which they were opened."""
        return tuple(self._all)

    @property
    def held(self) -> tuple[HeldModel, ...]:
        """What is loaded or being loaded, as values."""
        return tuple(model.held for model in self._all if model.held is not None)

    @property
    def loading(self) -> OpenModel | None:
        """The one that is being loaded, or whose load is being cancelled."""
        return next((model for model in self._all if model.loading.is_busy), None)

    def now_s(self) -> float:
        """Return the time that idle times are compared with."""
        return self._clock()

    def find(self, key: FileIdentity) -> OpenModel | None:
        """Return the open model of this file."""
        return next((model for model in self._all if model.key == key), None)

    def copies(self, path: Path) -> int:
        """Return how often a file is open."""
        return sum(model.file is not None and model.file.paths[0] == path for model in self._all)

    def place(self, file: ModelFile, key: FileIdentity, *, beside: bool = False) -> OpenModel:
        """Return the open model for a file that is not open yet: the current one where it is blank, else a new one.

        `beside`: whatever is open stays open.
        """
        is_free = self.current.file is None if beside else self.current.is_blank
        model = self.current if is_free else self._add()
        model.begin(file, key)
        return model

    def make_current(self, model: OpenModel) -> None:
        """Show `model` from now on."""
        if model is not self.current:
            self.current = model
            self.current_changed.emit(model)

    def unload_expired(self) -> None:
        """Unload what has been idle for longer than its keep-alive."""
        over = {held.key for held in expired(self.held, self._clock())}
        for model in self._all:
            if model.key in over and model.loading.phase is Phase.READY:
                model.loading.unload()
                self.expired.emit(model)
        self._wait_for_next()

    def close(self) -> None:
        """End every child, all at once, waiting a bounded time."""
        self._timer.stop()
        for model in self._all:
            model.loading.prepare_close()
        closing = [threading.Thread(target=model.loading.close, name="close a model") for model in self._all]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _add(self) -> OpenModel:
        model = OpenModel(len(self._all), self._calibrator, self._clock, self)
        model.changed.connect(self._on_changed)
        self._all.append(model)
        self.added.emit(model)
        return model

    def _on_changed(self) -> None:
        self._wait_for_next()
        self.changed.emit()

    def _wait_for_next(self) -> None:
        due_s = next_expiry_s(self.held)
        if due_s is None:
            self._timer.stop()
            return
        wait_ms = max(0, round((due_s - self._clock()) * 1000))
        self._timer.start(min(wait_ms, _LONGEST_WAIT_MS))
