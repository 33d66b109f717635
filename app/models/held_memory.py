"""What the open models hold of the devices: the rig and the watchman are told, and the children asked for readings."""

from __future__ import annotations

from PySide6.QtCore import QObject

from app.models.document import LayoutDocument
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.rig.live_rig import LiveRig
from app.rig.sampling import Watchman
from engine.planning.layout.engine_parameters import used_devices
from engine.runtime.session.status import Phase


class HeldMemory(QObject):
    """Made before others who follow the models: they ask what is free on devices that know of them."""

    def __init__(self, models: OpenModels, live: LiveRig, watchman: Watchman, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._models = models
        self._live = live
        self._watchman = watchman
        models.changed.connect(self._on_models_changed)
        models.current_changed.connect(self._on_models_changed)
        live.samples_arrived.connect(self._on_samples)

    def follow(self, model: OpenModel) -> None:
        """Take what the child of `model` reads of devices that nobody else can read."""
        model.loading.bridge.device_memory.connect(self._live.take_engine_readings)

    def may_probe(self, document: LayoutDocument) -> bool:
        """Whether the engine may be asked about what is edited now.

        What is loaded of the model holds its memory, others hold their workers, and a rig file cannot be asked.
        """
        plan, edit = document.plan, document.edit
        if (
            plan is None
            or edit is None
            or self._models.current.loading.phase is not Phase.STOPPED
            or not self._live.is_real
        ):
            return False
        used = used_devices(edit.layout)
        return not any(each.is_rpc and each.holdings for each in plan.rig.devices if each.id in used)

    def _on_models_changed(self) -> None:
        held = self._models.held
        self._live.set_models(held, self._models.current.held)
        self._watchman.watch([device for each in held for device, size_bytes in each.held_bytes.items() if size_bytes])

    def _on_samples(self) -> None:
        for model in self._models.all:
            if model.loading.phase is Phase.READY and model.holds_remote:
                model.loading.bridge.session.query_device_memory()
