"""Forecasts for all models of the library: their best layout by the preferred strategy, as if no model were loaded."""

from __future__ import annotations

from PySide6.QtCore import QObject

from app.library.catalogue import LibraryContents
from app.library.library import Library, Report
from app.models.auto_layouts import AutoLayouts
from app.models.open_models import OpenModels
from app.models.speeds import SpeedRepository
from app.rig.live_rig import LiveRig
from engine.base.cancellation import CancelToken
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import Rig
from engine.library.planning import settled_rig, settled_speeds
from engine.planning.fit.strategies.constraints import Constraints
from engine.planning.speed.speeds import Speeds
from widgets.common.delayed_call import DelayedCall

# Milliseconds without changes of the rig before it is planned for.
RIG_SETTLES_MS = 1_500


class ForecastPlanner(QObject):
    """Starts forecasts of the library's models: after each scan, and when rig, speeds or layout options change."""

    def __init__(
        self,
        library: Library,
        *,
        models: OpenModels,
        live: LiveRig,
        auto_layouts: AutoLayouts,
        speeds: SpeedRepository,
    ) -> None:
        super().__init__(library)
        self._library = library
        self._models, self._live, self._auto_layouts, self._speeds = models, live, auto_layouts, speeds
        self._task = library.task()
        self._rig: Rig | None = None
        self._planned_speeds: Speeds | None = None
        self._settling = DelayedCall(self, self._plan, RIG_SETTLES_MS)
        library.scan_begun.connect(self._task.cancel)
        library.scan_finished.connect(self._plan)
        library.closed.connect(self._stop)
        live.rig_changed.connect(self._on_rig_changed)
        speeds.known_changed.connect(self._on_speeds_changed)
        auto_layouts.options_changed.connect(lambda _options: self._plan_soon())
        auto_layouts.projectors_counted.connect(lambda _counted: self._plan_soon())

    def _stop(self) -> None:
        self._settling.stop()
        self._task.cancel()

    def _on_rig_changed(self, _rig: Rig) -> None:
        """Start new forecasts if the rig has changed since the last ones. Memory of loaded models counts as free."""
        if self._library.is_awake and self._settled() != self._rig:
            self._plan_soon()

    def _on_speeds_changed(self, speeds: Speeds) -> None:
        """Start new forecasts if measurements or answers have changed the speeds of devices noticeably."""
        before = self._planned_speeds
        if before is not None and settled_speeds(speeds, before) is not before:
            self._plan_soon()

    def _plan_soon(self) -> None:
        if self._library.is_awake:
            self._settling.start()

    def _settled(self) -> Rig:
        return settled_rig(self._live.rig_without(self._models.held), self._rig)

    def _plan(self) -> None:
        if self._library.is_scanning:
            return  # `scan_finished` follows
        self._settling.stop()
        rig = self._rig = self._settled()
        options = self._auto_layouts.options
        asked = Constraints(
            # The options may name devices of another rig.
            order=tuple(device for device in options.order if device in rig.ids),
            off=options.off & set(rig.ids),
            split=options.split,
            one_backend=options.one_backend,
            kv_types=options.kv_types,
        )
        catalogue = self._library.catalogue
        text_only = not self._auto_layouts.counts_projectors
        speeds = self._planned_speeds = settled_speeds(self._speeds.speeds, self._planned_speeds)

        def plan(report: Report, token: CancelToken) -> LibraryContents:
            constraints = replace(asked, speeds=speeds)
            catalogue.plan(rig, options.strategy, constraints, report, token, text_only=text_only)
            return catalogue.contents()

        words = tr("Checking which models fit: {done} of {total}")
        self._task.run(tr("Checking which models fit"), words, plan, self._library.show)
