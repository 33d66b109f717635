"""Passes the device memory of loaded models to the live rig, and to the monitor that warns of low memory.

The live rig has the devices that the next load will find.
"""

from __future__ import annotations

from PySide6.QtCore import QObject

from app.models.document import LayoutDocument
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.rig.live_rig import LiveRig
from app.rig.sampling import HeadroomMonitor
from engine.planning.layout.engine_parameters import used_devices
from engine.runtime.session.status import Phase


class HeldMemory(QObject):
    """Passes the device memory of loaded models to the live rig (the devices that the next load will find).

    It must be constructed before other receivers of the models' signals, which read free memory from the updated rig.
    """

    def __init__(
        self, models: OpenModels, live: LiveRig, headroom_monitor: HeadroomMonitor, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._models = models
        self._live = live
        self._headroom_monitor = headroom_monitor
        models.changed.connect(self._on_models_changed)
        models.current_changed.connect(self._on_models_changed)
        live.samples_arrived.connect(self._on_samples)

    def follow(self, model: OpenModel) -> None:
        """From now on, pass memory readings of the model's child to the live rig.

        These are readings of devices that only the child can query, such as RPC workers on other computers.
        """
        model.loading.bridge.device_memory.connect(self._live.take_engine_readings)

    def may_probe(self, document: LayoutDocument) -> bool:
        """Return whether the edited layout may be probed (loaded in a child process without allocating memory).

        False while the model is loaded, and while other models use RPC workers of the layout. False also if this
        computer lacks a device of an opened rig file.
        """
        plan, edit = document.plan, document.edit
        if (
            plan is None
            or edit is None
            or self._models.current.loading.phase is not Phase.STOPPED
            or not self._live.is_real
        ):
            return False
        # A worker serves one client at a time, so a probe of a held worker would wait.
        used = used_devices(edit.layout)
        return not any(each.is_rpc and each.holdings for each in plan.rig.devices if each.id in used)

    def _on_models_changed(self) -> None:
        held = self._models.held
        self._live.set_models(held, self._models.current.held)
        self._headroom_monitor.watch(
            [device for each in held for device, size_bytes in each.held_bytes.items() if size_bytes]
        )

    def _on_samples(self) -> None:
        for model in self._models.all:
            # Asked with each sample; the answers arrive as `device_memory`.
            if model.loading.phase is Phase.READY and model.holds_remote:
                model.loading.bridge.session.query_device_memory()
