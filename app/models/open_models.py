"""The list of open models, which of them is current, and their unloading after an idle time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from PySide6.QtCore import QObject, Signal

from app.models.open_model import OpenModel
from app.rig.calibrator import Calibrator
from engine.model.gguf.model_file import FileIdentity, ModelFile
from engine.planning.fit.loaded_models import UNTIL_UNLOADED_S, HeldModel, expired, next_expiry_s
from engine.runtime.session.status import Phase
from widgets.common.delayed_call import DelayedCall

_LONGEST_WAIT_S = 3600.0
"""Longest interval of the timer for idle times: Qt's intervals have 32 bits. A longer wait takes several intervals."""


class OpenModels(QObject):
    """Owns all open models. One of them is always current. At the start there is one open model, without a file."""

    added = Signal(object)  # OpenModel
    current_changed = Signal(object)  # OpenModel
    changed = Signal()
    """Emitted when memory or activity of a model has changed: a load, an unload, a request, the end of an answer."""
    expired = Signal(object)  # OpenModel: it was unloaded after its idle time

    def __init__(
        self,
        calibrator: Calibrator,
        *,
        clock: Callable[[], float] = time.monotonic,
        keep_alive_s: float = UNTIL_UNLOADED_S,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._calibrator = calibrator
        self._clock = clock
        self._keep_alive_s = keep_alive_s
        self._timer = DelayedCall(self, self.unload_expired)
        self._all: list[OpenModel] = []
        self.current = self._add()

    @property
    def all(self) -> tuple[OpenModel, ...]:
        """All open models, in the order of opening."""
        return tuple(self._all)

    @property
    def held(self) -> tuple[HeldModel, ...]:
        """Device memory of each model that is loaded or being loaded."""
        return tuple(model.held for model in self._all if model.held is not None)

    @property
    def loading(self) -> OpenModel | None:
        """The model whose load runs or is being cancelled; None if there is none."""
        return next((model for model in self._all if model.loading.is_busy), None)

    def now_s(self) -> float:
        """Return the present time, in seconds, on the clock that measures idle times."""
        return self._clock()

    def find(self, key: FileIdentity) -> OpenModel | None:
        """Return the open model with this file identity; None if there is none."""
        return next((model for model in self._all if model.key == key), None)

    def park(self, keys: Iterable[FileIdentity]) -> None:
        """Park the open models with these file identities: unload them until their next question."""
        for key in keys:
            # Another file may have taken its place since the caller looked.
            if (model := self.find(key)) is not None:
                model.park()

    def copies(self, path: Path) -> int:
        """Return how many open models have the file `path`."""
        return sum(model.file is not None and model.file.paths[0] == path for model in self._all)

    def place(self, file: ModelFile, key: FileIdentity, *, keep_current: bool = False) -> OpenModel:
        """Return an `OpenModel` for `file`: the current one if it is not loaded and its chat is empty, else a new one.

        The caller then makes the returned model current. `key`: identity of the file.
        `keep_current`: whether the current model must stay open if it has a file, even if it is not loaded and its chat
        is empty.
        """
        # A model that was opened a moment ago has a file but no content, and has to stay with `keep_current`.
        is_free = self.current.file is None if keep_current else self.current.is_blank
        model = self.current if is_free else self._add()
        model.begin(file, key)
        return model

    def make_current(self, model: OpenModel) -> None:
        """Make `model` the current one, and emit `current_changed`."""
        if model is not self.current:
            self.current = model
            self.current_changed.emit(model)

    def unload_expired(self) -> None:
        """Unload the models that have been idle for longer than their keep-alive time."""
        over = {held.key for held in expired(self.held, self._clock())}
        for model in self._all:
            # A model that answers is not idle, whatever the clock says.
            if model.key in over and model.loading.phase is Phase.READY:
                model.loading.unload()
                self.expired.emit(model)
        self._wait_for_next()

    def set_keep_alive(self, keep_alive_s: float) -> None:
        """Set the idle time, in seconds, after which models are unloaded.

        A model for which the user has chosen another idle time keeps the chosen one.
        """
        self._keep_alive_s = keep_alive_s
        for model in self._all:
            model.set_default_keep_alive(keep_alive_s)

    def close(self) -> None:
        """End the children of all models in parallel, within a bounded time."""
        self._timer.stop()
        # First, in the GUI thread: models may still save KV states before their children end.
        for model in self._all:
            model.loading.prepare_close()
        # In parallel, since each child may take seconds to end.
        closing = [threading.Thread(target=model.loading.close, name="close a model") for model in self._all]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _add(self) -> OpenModel:
        model = OpenModel(len(self._all), self._calibrator, self._clock, self, keep_alive_s=self._keep_alive_s)
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
        wait_s = min(max(0.0, due_s - self._clock()), _LONGEST_WAIT_S)
        self._timer.start(round(wait_s * 1000))
