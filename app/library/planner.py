"""Forecasts for the whole list, for the rig as it is at rest and the strategy that people like best."""

from __future__ import annotations

from dataclasses import replace

from PySide6.QtCore import QObject, QTimer

from app.library.looker import Looker
from app.library.shelf import Shelf
from app.library.shown import ShownLibrary
from app.models.auto_layouts import AutoLayouts
from app.models.open_models import OpenModels
from app.models.speeds import SpeedKeeper
from app.rig.live_rig import LiveRig
from engine.cancellation import CancelToken
from engine.devices.device import Rig
from engine.fit.strategies.constraints import Constraints
from engine.language import tr
from engine.library.settled import settled_rig, settled_speeds
from engine.speed.speeds import Speeds

RIG_SETTLES_MS = 1_500
"""A rig that changes is planned for once it has been quiet for so long."""


class Planner(QObject):
    """Plans after each look, and again where rig or wishes are others."""

    def __init__(
        self,
        shown: ShownLibrary,
        looker: Looker,
        *,
        models: OpenModels,
        live: LiveRig,
        auto_layouts: AutoLayouts,
        speeds: SpeedKeeper,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._shown, self._looker = shown, looker
        self._models, self._live, self._auto_layouts, self._speeds = models, live, auto_layouts, speeds
        self._token = CancelToken()
        self._rig: Rig | None = None
        self._planned_speeds: Speeds | None = None
        self._settling = QTimer(self)
        self._settling.setSingleShot(True)
        self._settling.setInterval(RIG_SETTLES_MS)
        self._settling.timeout.connect(self._plan)
        looker.begun.connect(self._drop)
        looker.finished.connect(self._plan)
        live.rig_changed.connect(self._on_rig_changed)
        speeds.known_changed.connect(self._on_speeds_changed)
        auto_layouts.wishes_changed.connect(lambda _wishes: self._plan_soon())

    def close(self) -> None:
        """End what is under way."""
        self._settling.stop()
        self._drop()

    def _drop(self) -> None:
        """Plan no further what was asked for."""
        self._token.cancel()

    def _on_rig_changed(self, _rig: Rig) -> None:
        """Plan again where the rig, without what is loaded of ours, is another one than was planned for."""
        if self._shown.is_awake and self._settled() != self._rig:
            self._plan_soon()

    def _on_speeds_changed(self, speeds: Speeds) -> None:
        """Plan again where measurements or answers make other speeds of it."""
        before = self._planned_speeds
        if before is not None and settled_speeds(speeds, before) is not before:
            self._plan_soon()

    def _plan_soon(self) -> None:
        if self._shown.is_awake:
            self._settling.start()

    def _settled(self) -> Rig:
        return settled_rig(self._live.rig_without(self._models.held), self._rig)

    def _plan(self) -> None:
        if self._looker.is_looking:
            return  # It follows.
        self._settling.stop()
        self._drop()
        token = self._token = CancelToken()
        rig = self._rig = self._settled()
        wishes = self._auto_layouts.wishes
        asked = Constraints(
            order=tuple(device for device in wishes.order if device in rig.ids),
            off=wishes.off & set(rig.ids),
            split=wishes.split,
            kv_types=wishes.kv_types,
        )
        stock = self._shown.stock
        speeds = self._planned_speeds = settled_speeds(self._speeds.speeds, self._planned_speeds)

        def plan() -> Shelf:
            constraints = replace(asked, speeds=speeds)
            tell = self._shown.teller(token, tr("Planning for this rig: {done} of {whole}"))
            stock.plan(rig, wishes.strategy, constraints, tell, token)
            return stock.shelf()

        def done(shelf: Shelf) -> None:
            if not token.cancelled:
                self._shown.show(shelf)
                self._shown.progress.emit("")

        self._shown.run(tr("Planning the library"), plan, done)
