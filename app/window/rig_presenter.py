"""The devices' cards: which devices there are, their samples and alerts, and what people change of them."""

from __future__ import annotations

from PySide6.QtCore import QObject

from app.notices import Notices
from app.rig.device_search import DeviceSearch
from app.rig.lab import Lab
from app.rig.limits import LimitSetter
from app.rig.live_rig import LiveRig
from app.rig.watchman import Watchman
from app.window.actions import Actions
from engine.devices.device import Rig
from widgets.devices.device_strip import DeviceStrip


class RigPresenter(QObject):
    """Says when a worker of the lab is lost."""

    def __init__(
        self,
        live: LiveRig,
        lab: Lab,
        *,
        search: DeviceSearch,
        limits: LimitSetter,
        watchman: Watchman,
        strip: DeviceStrip,
        actions: Actions,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._strip = strip
        self._actions = actions
        self._notices = notices
        live.rig_changed.connect(self._on_rig_changed)
        live.samples_arrived.connect(strip.add_samples)
        watchman.alerts_changed.connect(strip.set_alerts)
        lab.worker_lost.connect(self._on_worker_lost)
        lab.running_changed.connect(self._on_lab_running)
        strip.limits_edited.connect(limits.set)
        strip.remove_requested.connect(search.remove)
        self._on_rig_changed(live.rig)

    def _on_rig_changed(self, rig: Rig) -> None:
        self._strip.set_devices(rig.all_devices)

    def _on_lab_running(self, running: bool) -> None:
        self._actions.enable(start_lab=not running, stop_lab=running)

    def _on_worker_lost(self, sentence: str) -> None:
        self._notices.say(sentence, bad=True)
