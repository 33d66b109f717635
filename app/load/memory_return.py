"""The time between an unload and the next load: until the child has gone and its devices have their memory back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from PySide6.QtCore import QObject, QTimer, Signal

from app.models.loading import ModelState
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.rig.live_rig import LiveRig
from engine.fit.loaded_models import HeldModel, Recovery, begin_recovery
from engine.language import tr

POLL_MS = 100


@dataclass(frozen=True, slots=True)
class _Leaving:
    model: OpenModel
    recovery: Recovery | None


class MemoryReturn(QObject):
    """Follows every unload; a load that comes meanwhile waits here, a bounded time."""

    waiting_changed = Signal(str)  # what is waited for, for people; empty: nothing any more

    def __init__(self, models: OpenModels, keeper: LiveRig, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._models = models
        self._keeper = keeper
        self._held: dict[OpenModel, HeldModel] = {}
        self._leaving: list[_Leaving] = []
        self._then: Callable[[], None] | None = None
        self._poll = QTimer(self)
        self._poll.setInterval(POLL_MS)
        self._poll.timeout.connect(self._on_poll)
        models.changed.connect(self._on_models_changed)

    @property
    def is_waiting(self) -> bool:
        """Whether a load waits."""
        return self._then is not None

    def then(self, begin: Callable[[], None]) -> None:
        """Call `begin` when nothing is on its way out any more, at once where nothing is."""
        self._then = begin
        self._on_poll()
        if self.is_waiting:
            self._poll.start()
            self.waiting_changed.emit(self._text())

    def cancel(self) -> None:
        """Forget the load that waits."""
        if self.is_waiting:
            self._stop()

    def _on_models_changed(self) -> None:
        held = {model: model.held for model in self._models.all if model.held is not None}
        for model, before in self._held.items():
            if model not in held:
                self._leaving.append(_Leaving(model, self._recovery(before)))
        self._held = held

    def _recovery(self, gone: HeldModel) -> Recovery | None:
        free_bytes = self._keeper.memory.free_bytes
        return begin_recovery(self._keeper.rig, free_bytes, gone.held_bytes, self._models.now_s())

    def _on_poll(self) -> None:
        self._leaving = [each for each in self._leaving if not self._is_over(each)]
        if not self._leaving and self._then is not None:
            begin = self._then
            self._stop()
            begin()

    def _is_over(self, leaving: _Leaving) -> bool:
        if leaving.model.loading.state is not ModelState.EMPTY:
            return True  # It is loaded again: its own child's end comes first anyhow.
        if leaving.model.loading.has_child:
            return False
        recovery = leaving.recovery
        return recovery is None or recovery.is_over(self._keeper.memory.free_bytes, self._models.now_s())

    def _stop(self) -> None:
        was_polling = self._poll.isActive()
        self._poll.stop()
        self._then = None
        if was_polling:
            self.waiting_changed.emit("")

    def _text(self) -> str:
        devices = {device for each in self._leaving if each.recovery is not None for device in each.recovery.devices}
        if devices:
            return tr("Waiting for memory to come back on {names}", names=", ".join(sorted(devices)))
        return tr("Waiting for {names} to end", names=", ".join(each.model.name for each in self._leaving))
