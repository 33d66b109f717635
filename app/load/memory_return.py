"""The wait between an unload and the next load: until the child process has exited and its memory is free."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from PySide6.QtCore import QObject, QTimer

from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.rig.live_rig import LiveRig
from engine.base.language import tr
from engine.planning.fit.loaded_models import HeldModel, Recovery, begin_recovery
from engine.runtime.session.status import Phase

POLL_MS = 100


class _Leaving(Struct, frozen=True):
    model: OpenModel
    recovery: Recovery | None


class MemoryReturn(QObject):
    """Delays a load until models that are being unloaded have freed their memory, for a bounded time."""

    def __init__(self, models: OpenModels, live: LiveRig, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._models = models
        self._live = live
        self._held: dict[OpenModel, HeldModel] = {}
        self._leaving: list[_Leaving] = []
        self._then: Callable[[], None] | None = None
        self.waiting: OpenModel | None = None
        """The model whose load waits until unloaded models have freed their memory; None if no load waits."""
        self._poll = QTimer(self)
        # Polled: a child may end, a sample arrive, or the limit of `Recovery` pass.
        self._poll.setInterval(POLL_MS)
        self._poll.timeout.connect(self._on_poll)
        models.changed.connect(self._on_models_changed)

    @property
    def is_waiting(self) -> bool:
        """Whether a load waits until unloaded models have freed their memory."""
        return self._then is not None

    def then(self, model: OpenModel, begin: Callable[[], None]) -> None:
        """Call `begin`, which loads `model`, when models that are being unloaded have freed their memory.

        Until then the status of `model` shows the wait. `begin` is called at once if no unload is under way.
        """
        self._then, self.waiting = begin, model
        self._on_poll()
        if self.is_waiting:
            self._poll.start()
            model.set_wait_text(self._text())

    def cancel(self) -> None:
        """Cancel the load that waits until unloaded models have freed their memory."""
        if self.is_waiting:
            self._stop()

    def _on_models_changed(self) -> None:
        held = {model: model.held for model in self._models.all if model.held is not None}
        for model, before in self._held.items():
            if model not in held:
                # What it held is noted here only: the model itself holds nothing any more.
                self._leaving.append(_Leaving(model, self._recovery(before)))
        self._held = held

    def _recovery(self, unloaded: HeldModel) -> Recovery | None:
        free_bytes = self._live.memory.free_bytes
        return begin_recovery(self._live.rig, free_bytes, unloaded.held_bytes, self._models.now_s())

    def _on_poll(self) -> None:
        self._leaving = [each for each in self._leaving if not self._is_over(each)]
        if not self._leaving and self._then is not None:
            # Forgotten before the call: `begin` may make another load wait here.
            begin = self._then
            self._stop()
            begin()

    def _is_over(self, leaving: _Leaving) -> bool:
        if leaving.model.loading.phase is not Phase.STOPPED:
            return True  # It is loaded again: its own child's end comes first anyhow.
        if leaving.model.loading.has_child:
            return False
        recovery = leaving.recovery
        return recovery is None or recovery.is_over(self._live.memory.free_bytes, self._models.now_s())

    def _stop(self) -> None:
        self._poll.stop()
        model, self._then, self.waiting = self.waiting, None, None
        if model is not None:
            model.set_wait_text("")

    def _text(self) -> str:
        devices = {device for each in self._leaving if each.recovery is not None for device in each.recovery.devices}
        if devices:
            return tr("Waiting until the memory of {names} is free again", names=", ".join(sorted(devices)))
        return tr("Waiting for {names} to be unloaded", names=", ".join(each.model.name for each in self._leaving))
