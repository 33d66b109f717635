"""Searches for a new layout when free memory changes, such as after an unload, if nobody has edited the layout."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import QObject

from app.models.document import LayoutDocument
from app.models.layouts import Layouts
from app.models.open_models import OpenModels
from app.models.opener import ModelOpener
from app.rig.live_rig import LiveRig
from app.settings import Settings
from engine.base.units import MIB
from engine.devices.device import Rig
from widgets.common.delayed_call import DelayedCall
from widgets.library.load_question import LoadDecision

SETTLE_MS = 1500
"""Milliseconds between a change of free memory and the search for a layout, because drivers free memory in steps."""
_STEPS = 32
"""Divisor of a device's memory: changes of free memory below 1/32 are ignored, because other programs cause them."""
_LEAST_BYTES = 16 * MIB


class Replanner(QObject):
    """Searches for a new layout if the free memory of devices changes and nobody has edited the present layout.

    Each model stores the devices for which its layout was found (`OpenModel.planned_rig`). When a model is shown again
    or unloaded, the present devices are compared with the stored ones. No search is started during a
    drag, during a load, or for a loaded model.

    A parked model (unloaded until its next question) keeps its layout even if it does not fit now, because its next
    load may unload other models. If the preference is to plan around loaded models, a new layout is searched for
    instead.
    """

    def __init__(
        self,
        document: LayoutDocument,
        models: OpenModels,
        live: LiveRig,
        layouts: Layouts,
        opener: ModelOpener,
        settings: Settings,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._document, self._models, self._live, self._layouts = document, models, live, layouts
        self._settings = settings
        self._timer = DelayedCall(self, self._on_settled, SETTLE_MS)
        live.rig_changed.connect(self._look)
        models.changed.connect(self._look)
        opener.model_changed.connect(self._look)

    def _look(self) -> None:
        """Start the timer for a new layout search if free memory has changed since the layout was found.

        Otherwise stop the timer. A timer that runs already is not restarted.
        """
        model, rig = self._models.current, self._live.rig
        planned = model.planned_rig
        if planned is None or self._document.model is None:
            self._timer.stop()
        elif planned.ids != rig.ids:
            # Other devices: `Layouts` follows these.
            model.planned_rig = rig
            self._timer.stop()
        elif not has_moved(rig, available_of(planned)):
            self._timer.stop()
        # A running timer is not restarted: memory that changes all the time would put the search off forever.
        elif not self._timer.isActive():
            self._timer.start()

    def _on_settled(self) -> None:
        model, rig = self._models.current, self._live.rig
        if model.planned_rig is None or not has_moved(rig, available_of(model.planned_rig)):
            return
        if self._models.loading is not None or model.held is not None:
            # Its end, or the unload, is told by `changed`. Memory moves until then.
            return
        if self._document.is_dragging or self._document.is_behind:
            self._timer.start()
            return
        if self._stays_parked:
            return
        model.planned_rig = rig
        self._layouts.follow_memory()

    @property
    def _stays_parked(self) -> bool:
        """Whether the current model is parked (unloaded until its next question) and keeps a layout that does not fit.

        It keeps the layout because its next load may unload other models. False if the preference is to plan around
        loaded models: no model is unloaded then, so another layout is needed.
        """
        plan = self._document.plan
        is_around = self._settings.without_room is LoadDecision.BESIDE
        return self._models.current.is_parked and not is_around and plan is not None and not plan.report.fits


def available_of(rig: Rig) -> dict[str, int]:
    """Return the available bytes of each device, by id. The host is left out unless devices share its memory."""
    devices = rig.devices if rig.pool is None else rig.all_devices
    return {device.id: device.available_bytes for device in devices}


def has_moved(rig: Rig, before: Mapping[str, int]) -> bool:
    """Return whether the free memory of any device has changed by more than other programs usually cause.

    `before`: available bytes by device id at an earlier time.
    """
    now = available_of(rig)
    return any(
        abs(now[device.id] - before[device.id]) >= max(_LEAST_BYTES, device.total_bytes // _STEPS)
        for device in rig.all_devices
        if device.id in now and device.id in before
    )
