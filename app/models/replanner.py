"""Plans a layout that nobody has edited again when free memory changes, such as when a model is unloaded."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import QObject, QTimer

from app.models.document import LayoutDocument
from app.models.layouts import Layouts
from app.models.open_models import OpenModels
from app.models.opener import ModelOpener
from app.rig.live_rig import LiveRig
from engine.base.units import MIB
from engine.devices.device import Rig
from engine.model.gguf.model_file import FileIdentity

SETTLE_MS = 1500
"""Milliseconds for which changed memory must stay changed. Drivers give memory back in steps."""
_STEPS = 32
"""Number of steps of a device's total memory. Changes of less than a step are ignored: other programs cause them."""
_LEAST_BYTES = 16 * MIB


class Replanner(QObject):
    """Watches the free memory of devices, and starts a search for a new layout if nobody has edited the layout.

    The free memory for which a layout was found is stored for each model. A model that is shown again later is compared
    with that. Nothing is done during a drag, while a model is being loaded, or for a loaded model.
    """

    def __init__(
        self,
        document: LayoutDocument,
        models: OpenModels,
        live: LiveRig,
        layouts: Layouts,
        opener: ModelOpener,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._document, self._models, self._live, self._layouts = document, models, live, layouts
        self._planned: dict[FileIdentity, Mapping[str, int]] = {}
        """Available bytes by device id for which the layout of each model was found."""
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(SETTLE_MS)
        self._timer.timeout.connect(self._on_settled)
        live.rig_changed.connect(self._look)
        models.changed.connect(self._look)
        opener.model_changed.connect(self._look)

    def _look(self) -> None:
        """Start the timer if free memory is not that for which the layout was found; stop it if it is again."""
        key = self._models.current.key
        if key is None or self._document.model is None:
            self._timer.stop()
            return
        now = available_of(self._live.rig)
        before = self._planned.setdefault(key, now)
        if before.keys() != now.keys():
            # Other devices: `Layouts` follows these.
            self._planned[key] = now
            self._timer.stop()
        elif not has_moved(self._live.rig, before):
            self._timer.stop()
        elif not self._timer.isActive():
            self._timer.start()

    def _on_settled(self) -> None:
        key, rig = self._models.current.key, self._live.rig
        if key is None or key not in self._planned or not has_moved(rig, self._planned[key]):
            return
        if self._models.loading is not None:
            # Memory moves until that load has ended, which `changed` tells.
            return
        if self._document.is_dragging:
            self._timer.start()
            return
        self._planned[key] = available_of(rig)
        self._layouts.follow_memory()


def available_of(rig: Rig) -> dict[str, int]:
    """Return the available bytes of each device, by id. The host is included only if devices share its memory."""
    devices = rig.devices if rig.pool is None else rig.all_devices
    return {device.id: device.available_bytes for device in devices}


def has_moved(rig: Rig, before: Mapping[str, int]) -> bool:
    """Return whether the memory of a device differs from `before` by more than other programs usually move."""
    now = available_of(rig)
    return any(
        abs(now[device.id] - before[device.id]) >= max(_LEAST_BYTES, device.total_bytes // _STEPS)
        for device in rig.all_devices
        if device.id in now and device.id in before
    )
