"""The devices: their cards with samples and alerts, what people change of them, and weights kept for clients."""

from __future__ import annotations

import logging

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QMessageBox, QWidget

from app.background import Background
from app.notices import Notices
from app.paths import kept_weights_path
from app.rig.device_search import DeviceSearch
from app.rig.lab import Lab
from app.rig.limits import LimitSetter
from app.rig.live_rig import LiveRig
from app.rig.sampling import Watchman
from app.window.actions import Actions
from engine.base.errors import EngineError
from engine.base.kept_weights import empty, kept_bytes
from engine.base.language import tr
from engine.base.units import format_bytes
from engine.devices.device import Rig
from widgets.devices.device_strip import DeviceStrip

_log = logging.getLogger("layerdeck.kept_weights")
_TITLE = tr("Weights Kept by Workers")


class RigPresenter(QObject):
    """Shows the devices on their cards, and carries limits and removals from there."""

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


class KeptWeightsPresenter(QObject):
    """Shows how much disk the weights take that workers of this computer keep, and removes them if people say so."""

    def __init__(self, background: Background, notices: Notices, window: QWidget) -> None:
        super().__init__(window)
        self._background, self._notices, self._window = background, notices, window

    def show(self) -> None:
        """Say how much is kept, with a button that removes it."""
        folder = kept_weights_path()
        self._background.run("Counting weights", lambda: kept_bytes(folder), self._ask, _log_error, quiet=True)

    def _ask(self, size_bytes: int) -> None:
        text = tr(
            "Workers that this computer runs for others (layerdeck-cli rig serve) keep {size} of "
            "weights in {kept_weights_path}, so that they are sent once.",
            size=format_bytes(size_bytes),
            kept_weights_path=kept_weights_path(),
        )
        if not size_bytes:
            text = tr("Workers that this computer runs for others (layerdeck-cli rig serve) keep no weights here.")
        box = QMessageBox(QMessageBox.Icon.NoIcon, _TITLE, text, QMessageBox.StandardButton.Close, self._window)
        if size_bytes:
            box.addButton(tr("&Empty"), QMessageBox.ButtonRole.DestructiveRole).clicked.connect(self._on_empty)
        box.open()

    def _on_empty(self) -> None:
        folder = kept_weights_path()
        self._background.run(tr("Removing weights"), lambda: empty(folder), self._say_removed, _log_error)

    def _say_removed(self, freed_bytes: int) -> None:
        self._notices.say(
            tr("{freed} of kept weights were removed; clients send them again.", freed=format_bytes(freed_bytes))
        )


def _log_error(error: EngineError) -> None:
    _log.info("kept weights: %s", error.summary())
