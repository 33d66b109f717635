"""Forecasts for models that are not loaded: the memory that they need, and whether they fit.

Model lists show the forecasts. Loads do not use them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from engine.api.server.pool import ModelPool
from engine.api.server.pool_functions import Holdings
from engine.api.wire.names import ModelEntry
from engine.base.errors import EngineError
from engine.devices.device import Rig
from engine.planning.fit.loaded_models import rig_after_unload
from engine.planning.fit.unload_plan import plan_unloads
from engine.planning.layout.layout_file import encode_layout
from engine.planning.plan.report import DeviceRow

FRESH_S = 300.0
"""Seconds for which a plan is reused. The memory that loaded models hold is read anew for each forecast."""
LIST_SECONDS = 2.0
"""Longest time in seconds that a model list waits for missing plans; they are then completed in the background."""


class _Planned(Struct, frozen=True):
    """One planned load, reduced to the values that a forecast shows.

    `made_s`: time of the monotonic clock at which the plan was made.
    `rows`: forecast of memory by device.
    `layout`: the planned layout as JSON.
    `fault`: a sentence on why the model cannot be loaded; empty if it can.
    """

    made_s: float
    rows: tuple[DeviceRow, ...] = ()
    layout: bytes = b"null"
    fault: str = ""


class Forecasts:
    """Plans loads of the models that a server offers, one at a time, in threads, and caches the plans.

    Its methods may be called in the server's event loop only.
    """

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool
        self._plans: dict[tuple[object, ...], _Planned] = {}
        self._rig: Rig | None = None
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    async def of(self, entry: ModelEntry) -> dict[str, Any]:
        """Return the forecast of one model as JSON fields; plan its load first if no plan is younger than `FRESH_S`
        seconds.
        """
        async with self._lock:
            if self._fresh(entry) is None and await self._look():
                await self._plan(entry)
        return self.known(entry)

    async def prepare(self, entries: Sequence[ModelEntry]) -> None:
        """Plan the loads of all models in `entries` that have no plan younger than `FRESH_S` seconds.

        Return after `LIST_SECONDS` at the latest; the planning continues in the background.
        """
        missing = [entry for entry in entries if self._fresh(entry) is None]
        if missing and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._plan_all(missing))
        if self._task is not None and not self._task.done():
            await asyncio.wait((self._task,), timeout=LIST_SECONDS)

    def known(self, entry: ModelEntry) -> dict[str, Any]:
        """Return the cached forecast of a model as JSON fields. Does not plan.

        The field `fits` tells whether the model fits beside the models that are loaded now, or after some of them are
        unloaded. Without a plan younger than `FRESH_S` seconds, `fits` is None and there are no other fields.
        """
        planned, rig = self._fresh(entry), self._rig
        if planned is None or rig is None:
            return {"fits": None}
        if planned.fault:
            return {"fits": "no", "reason": planned.fault}
        holdings = self._pool.holdings()
        unloads = plan_unloads(planned.rows, holdings.own, lambda leaving: rig_after_unload(rig, holdings.all, leaving))
        fits = "no" if unloads.still_short else "after_unloading" if unloads.victims else "yes"
        return {
            "fits": fits,
            "unloads": [held.name for held in unloads.victims] if fits == "after_unloading" else [],
            "missing": [{"device": device, "missing_bytes": missing} for device, missing in unloads.still_short],
            "forecast": [row for row in planned.rows if row.need_bytes],
            "layout": msgspec.Raw(planned.layout),
        }

    async def close(self) -> None:
        """Cancel the background task that plans loads, and wait for its end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _plan_all(self, entries: Sequence[ModelEntry]) -> None:
        async with self._lock:
            if not await self._look():
                return
        for entry in entries:
            # Plans take the interpreter from answers that are under way; the next list goes on.
            if self._pool.is_busy:
                return
            async with self._lock:
                if self._fresh(entry) is None:
                    await self._plan(entry)

    async def _look(self) -> bool:
        """Query the devices. Return False if they cannot be read; then nothing can be planned."""
        try:
            self._rig = await asyncio.to_thread(self._pool.functions.rig)
        except (EngineError, NotImplementedError):
            # A pool whose models are loaded elsewhere need not know the devices.
            return False
        return True

    async def _plan(self, entry: ModelEntry) -> None:
        assert self._rig is not None
        holdings: Holdings = self._pool.holdings()
        # As a load finds the devices: what is idle would have gone by then.
        rig = rig_after_unload(self._rig, holdings.all, holdings.own)
        key = _key(entry)
        self._plans[key] = await asyncio.to_thread(self._planned, entry, rig)

    def _planned(self, entry: ModelEntry, rig: Rig) -> _Planned:
        now_s = time.monotonic()
        try:
            plan = self._pool.functions.plan(entry, rig).plan
            layout = encode_layout(plan.edit.as_file(plan.model.name))
            fault = plan.violations[0].message if plan.violations else ""
            return _Planned(now_s, plan.forecast, layout, fault)
        except EngineError as error:
            return _Planned(now_s, fault=error.summary())

    def _fresh(self, entry: ModelEntry) -> _Planned | None:
        planned = self._plans.get(_key(entry))
        return planned if planned is not None and time.monotonic() - planned.made_s < FRESH_S else None


def _key(entry: ModelEntry) -> tuple[object, ...]:
    """Return the cache key of a model's plan: all values on which the plan depends, except for the devices."""
    try:
        state = entry.path.stat()
        return entry.id, entry.path, entry.layout, entry.projector, state.st_mtime_ns, state.st_size
    except OSError:
        return entry.id, entry.path, entry.layout, entry.projector
