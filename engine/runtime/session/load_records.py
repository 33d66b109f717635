"""Log records of loads: forecast and measured memory of each device, and the time of each stage.

A line `load {...}` has the fields `plan, ending, kind, attempts, seconds, devices, elsewhere`. `seconds` has the time
of each stage. A device has the fields `id`, `forecast_bytes` and `measured_bytes`, which is null unless the load
succeeded. `elsewhere` names the layers that are on another device than the layout asks for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from engine.base.values import replace
from engine.planning.plan.placement_check import difference_text
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow
from engine.runtime.process.records import MAX_DEVICES, log_record
from engine.runtime.session.events import Attempt, Loaded, LoadEnding, Progress, Stage

_Event = TypeVar("_Event")


class LoadRecorder:
    """Measures the stages of a session's loads by their events, and logs a record at the end of each load.

    Use a recorder in one thread only. `clock`: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._plan: Plan | None = None
        self._stage: Stage | None = None
        self._since_s = 0.0
        self._seconds: dict[Stage, float] = {}
        self._attempts = 0

    def begin_child(self, plan: Plan) -> None:
        """Set the plan of a child that starts, for the record of its load."""
        self._plan = plan

    def take(self, event: _Event) -> _Event:
        """Process an event of the session and return it. A returned `Loaded` has the time of each stage.

        Events that are not about a load are returned unchanged.
        """
        match event:
            case Progress():
                self._enter(event.stage)
            case Attempt():
                self._attempts += 1
            case _ if isinstance(event, LoadEnding) and self._stage is not None and _is_of_load(event):
                self._enter(None)
                self._log(event)
                seconds = {stage: round(each, 3) for stage, each in self._seconds.items()}
                self._plan, self._seconds, self._attempts = None, {}, 0
                if isinstance(event, Loaded):
                    return replace(event, seconds=seconds)
        return event

    def _enter(self, stage: Stage | None) -> None:
        now_s = self._clock()
        if self._stage is not None:
            self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now_s - self._since_s
        self._stage, self._since_s = stage, now_s

    def _log(self, ending: LoadEnding) -> None:
        forecast = () if self._plan is None else self._plan.forecast
        measured = ending.devices if isinstance(ending, Loaded) else None
        log_record(
            "load",
            {
                "plan": "" if self._plan is None else self._plan.mark,
                "ending": str(ending.__struct_config__.tag),
                "kind": getattr(ending, "kind", None),
                "attempts": max(1, self._attempts),
                "seconds": {stage: round(seconds, 3) for stage, seconds in self._seconds.items()},
                "devices": _devices(forecast, measured),
                "elsewhere": difference_text(ending.elsewhere) if isinstance(ending, Loaded) else "",
            },
        )


def _is_of_load(event: LoadEnding) -> bool:
    """Return whether the event ends a load. Events of the same types that end requests have a request number."""
    return getattr(event, "request", None) is None


def _devices(forecast: Sequence[DeviceRow], measured: Sequence[DeviceRow] | None) -> list[dict[str, object]]:
    found = {} if measured is None else {row.id: row.need_bytes for row in measured}
    return [
        {"id": row.id, "forecast_bytes": row.need_bytes, "measured_bytes": found.get(row.id)}
        for row in forecast[:MAX_DEVICES]
    ]
