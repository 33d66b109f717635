"""Presenters of devices: cards with memory samples and alerts, changed limits, and weights that workers cache."""

from __future__ import annotations

import logging

from PySide6.QtCore import QObject, Qt
from PySide6.QtWidgets import QMessageBox, QWidget

from app.background import Background
from app.notices import Notices
from app.paths import weight_cache_path
from app.rig.device_search import DeviceSearch
from app.rig.lab import Lab
from app.rig.live_rig import LiveRig
from app.rig.sampling import HeadroomMonitor
from app.window.actions import Actions
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.base.units import format_bytes
from engine.base.weight_cache import empty, kept_bytes
from engine.devices.device import Rig
from engine.devices.hiding_variables import hiding_sentences
from engine.devices.telemetry.sample import Sample
from widgets.devices.device_strip import DeviceStrip
from widgets.devices.readings import simulated_text

_log = logging.getLogger("layerdeck.kept_weights")
_TITLE = tr("Weights Cached by Workers")


class RigPresenter(QObject):
    """Shows the devices on their cards, and carries out changes of limits and removals that the cards request."""

    def __init__(
        self,
        live: LiveRig,
        lab: Lab,
        *,
        search: DeviceSearch,
        headroom_monitor: HeadroomMonitor,
        strip: DeviceStrip,
        actions: Actions,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._live, self._lab, self._strip = live, lab, strip
        self._actions = actions
        self._notices = notices
        live.rig_changed.connect(self._on_rig_changed)
        live.samples_arrived.connect(self._on_samples)
        headroom_monitor.alerts_changed.connect(strip.set_alerts)
        lab.worker_lost.connect(self._on_worker_lost)
        lab.running_changed.connect(self._on_lab_running)
        lab.stopped_changed.connect(self._on_stopped_changed)
        # No worker runs or has stopped yet; the signals of the rig enable the actions.
        actions.enable(stop_lab=False, restart_lab=False)
        strip.limits_edited.connect(search.set_limits)
        strip.remove_requested.connect(search.remove)
        self._on_rig_changed(live.rig)

    def _on_rig_changed(self, rig: Rig) -> None:
        self._strip.set_devices(rig.all_devices)
        simulated = [device.id for device in rig.devices if device.endpoint in self._lab.endpoints]
        # The workers of a split by NUMA node use the real processors and memory of their nodes.
        if self._lab.has_nodes:
            simulated = []
        # Devices of a rig file are not searched for, so no variable hides them.
        hiding = "" if self._live.devices.from_file else hiding_sentences()
        self._strip.set_note(" ".join(filter(None, (simulated_text(simulated), hiding))))

    def _on_samples(self, samples: tuple[Sample, ...]) -> None:
        self._strip.add_samples(tuple(map(self._live.as_shown, samples)))

    def _on_lab_running(self, running: bool) -> None:
        self._actions.enable(start_lab=not running, stop_lab=running)

    def _on_stopped_changed(self, names: tuple[str, ...]) -> None:
        self._actions.enable(restart_lab=bool(names))

    def _on_worker_lost(self, sentence: str) -> None:
        self._notices.show(sentence, bad=True)


class CachedWeightsPresenter(QObject):
    """Shows the disk space of weights that RPC workers of this computer have cached, and removes them on request."""

    def __init__(self, background: Background, notices: Notices, window: QWidget) -> None:
        super().__init__(window)
        self._background, self._notices, self._window = background, notices, window

    def show(self) -> None:
        """Show a message box with the size of the weights that RPC workers have cached, and a button to remove them."""
        folder = weight_cache_path()
        self._background.run("Counting weights", lambda: kept_bytes(folder), self._ask, _log_error, quiet=True)

    def _ask(self, size_bytes: int) -> None:
        text = tr(
            "Workers that this computer runs for other computers have cached {size} of model weights in {cache_path}. "
            "So the other computers do not need to send these weights again.",
            size=format_bytes(size_bytes),
            cache_path=weight_cache_path(),
        )
        if not size_bytes:
            text = tr("No weights of other computers' models are cached on this computer.")
        box = QMessageBox(QMessageBox.Icon.NoIcon, _TITLE, text, QMessageBox.StandardButton.Close, self._window)
        box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        if size_bytes:
            box.addButton(tr("&Clear Cache"), QMessageBox.ButtonRole.DestructiveRole).clicked.connect(self._on_empty)
        box.open()

    def _on_empty(self) -> None:
        folder = weight_cache_path()
        self._background.run(tr("Removing cached weights"), lambda: empty(folder), self._show_removed, _log_error)

    def _show_removed(self, freed_bytes: int) -> None:
        self._notices.show(
            tr(
                "Removed {freed} of cached weights. Other computers will send the weights again.",
                freed=format_bytes(freed_bytes),
            )
        )


def _log_error(error: EngineError) -> None:
    _log.info("kept weights: %s", error.summary())
