"""The memory that devices need beyond the forecast: measured at each load, and used in later forecasts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QObject

from app.background import Background, Worker
from app.paths import calibration_path
from app.rig.live_rig import LiveRig
from engine.base.errors import EngineError
from engine.devices.device import CPU_ID, ComputingNeed, Rig
from engine.devices.telemetry.sample import Sample
from engine.planning.fit.calibration import NO_CALIBRATION, Calibration, change_calibration, read_calibration
from engine.runtime.session.events import Loaded

_log = logging.getLogger("layerdeck.calibration")


class Calibrator(QObject):
    """Measures how much memory devices use beyond the forecast (their overhead), and stores it in a file.

    On local devices other than the host, the overhead is computed from two memory samples, before and after a load. On
    workers and the host, it is computed from the sizes that llama.cpp reports.
    """

    def __init__(
        self, live: LiveRig, background: Background, path: Path | None = None, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._live = live
        self._background = background
        self._writer = Worker("calibration")
        self._path = path or calibration_path()
        self._used_bytes: dict[str, int] = {}
        self._before: dict[str, int] | None = None
        self._ended: tuple[Rig, Loaded] | None = None
        self._learns = True
        self.calibration = read_calibration(self._path)
        live.set_calibration(self.calibration)
        live.samples_arrived.connect(self._on_samples)

    def begin(self, *, nothing_loaded: bool, forecast_is_whole: bool = True) -> None:
        """Store how much memory all devices use just before a load, to measure overheads (use beyond the forecast).

        `nothing_loaded`: whether no model was loaded before. If one was, the overheads of local devices are not
        measured, because its unload changes their memory as well.
        `forecast_is_whole`: whether the forecast covers all memory. If not, no overhead is measured.
        """
        self._before = dict(self._used_bytes) if nothing_loaded else None
        self._learns = forecast_is_whole
        self._ended = None

    def finish(self, rig: Rig, event: Loaded) -> None:
        """Store `event`, the result of a successful load on `rig`.

        The overheads (memory beyond the forecast) are computed when the next memory samples arrive.
        """
        self._ended = (rig, event) if self._learns else None

    def forget(self) -> None:
        """Drop the result of the last load, so that no overhead (memory beyond the forecast) is computed from it.

        Called if the loaded model is unloaded before the next memory samples.
        """
        self._ended = None

    def learn(self, calibration: Calibration) -> None:
        """Use the overheads (memory beyond the forecast) in `calibration` from now on.

        The check of this computer (Help > Check This Computer) has measured them and written them to the file.
        """
        self._use(calibration)

    def learn_need(self, need: ComputingNeed) -> None:
        """Store how much memory beyond the forecast a model needed on a device while it computed."""
        self._keep(lambda known: known.with_need(need))

    def reset(self) -> None:
        """Delete all measured memory overheads of devices."""
        self._keep(lambda _known: NO_CALIBRATION)

    def _on_samples(self, samples: tuple[Sample, ...]) -> None:
        self._used_bytes = {each.device: each.used_bytes for each in samples if each.used_bytes is not None}
        if self._ended is None:
            return
        (rig, event), self._ended = self._ended, None
        # A local card tells by how much it grew, driver's share included; of workers and host the engine's rows say it.
        local = {device.id for device in rig.devices if not device.is_rpc and device.id != CPU_ID}
        # Without a reading from before the load (a model was replaced) only workers and host are learned from.
        before = self._before or {}
        grown = {
            device: used - before[device]
            for device, used in self._used_bytes.items()
            if device in local and device in before
        }
        rows = [row for row in event.devices if row.id not in local or row.id in grown]
        self._keep(lambda known: known.with_load(rig, event.forecast, rows, grown))

    def _use(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self._live.set_calibration(calibration)

    def _keep(self, change: Callable[[Calibration], Calibration]) -> None:
        """Apply `change` to the overheads of this window and to those in the file, which a command may have changed."""
        self._use(change(self.calibration))
        path = self._path

        def fail(error: EngineError) -> None:
            _log.info("calibration: %s", error.summary())

        self._background.run(
            "Keeping the calibration",
            # Read again: a command may have written to the file meanwhile.
            lambda: change_calibration(path, change),
            _nothing,
            fail,
            quiet=True,
            worker=self._writer,
        )


def _nothing(_result: None) -> None:
    """Do nothing when the file is written."""
