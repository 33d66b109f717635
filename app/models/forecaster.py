"""Forecasts for the layout editor: computed in the GUI thread if they are quick, else in a background thread.

Only one thread at a time may use a model's `PreviewCache` (values that all its previews share). So a new request for
this model waits while a background thread uses them. Of the requests that wait, only the newest is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain
from time import thread_time

from msgspec import Struct

from app.background import Background
from engine.base.errors import EngineError
from engine.devices.device import Rig
from engine.planning.memory.work_limit import limited
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import MeasuredAnswer, Preview, PreviewCache, make_preview
from engine.planning.speed.speeds import Speeds
from engine.runtime.probing.probe import ProbeCache

DIRECT_S = 0.005
"""Processor seconds: if no recent forecast took longer, the next one is computed in the GUI thread."""
PREVIEW_SECONDS = 0.5
"""Limit in processor seconds for one preview. Memory that is not computed by then is unknown until a probe."""


REMEMBERED = 8
"""Number of forecast durations that are stored for each kind of change (`Pace`).

The longest one decides whether the next forecast runs in the GUI thread: most steps of a drag are quick, but some have
to compute new numbers.
"""


class Pace:
    """Durations of the last forecasts for one model, in processor seconds. Use it in the GUI thread only.

    The durations are stored by the kind of change before the forecast: "devices", "settings", "layout", or "memory" if
    only free memory has changed.

    `first_s`: duration of the first forecast, which is made when the model is opened.
    """

    def __init__(self, first_s: float = 0.0) -> None:
        self._seconds = {"first": deque([first_s], maxlen=REMEMBERED)}
        self._last: tuple[Rig, Edit] | None = None

    def kind(self, rig: Rig, edit: Edit) -> str:
        """Return what has changed since the last forecast: "devices", "settings", "layout" or "memory".

        If several have changed, the first one in this order is returned, because it makes the forecast slowest.
        Before any forecast the result is "first".
        """
        if self._last is None:
            return "first"
        before_rig, before = self._last
        if rig.ids != before_rig.ids:
            return "devices"
        if edit.context != before.context or edit.side_files != before.side_files:
            return "settings"
        return "layout" if edit.layout != before.layout else "memory"

    def is_quick(self, rig: Rig, edit: Edit) -> bool:
        """Return whether a forecast for `rig` and `edit` will probably take at most `DIRECT_S` seconds.

        True if all stored forecasts after the same kind of change were within this limit. If none is stored for this
        kind, all forecasts of other kinds must be within it. The first forecast counts as quick, because the tables of
        the model are computed already.
        """
        if self._last is None:
            return True
        known = self._seconds.get(self.kind(rig, edit)) or chain.from_iterable(self._seconds.values())
        return max(known) <= DIRECT_S

    def note(self, rig: Rig, edit: Edit, seconds: float) -> None:
        """Store that the forecast for `rig` and `edit` took `seconds` of processor time."""
        self._seconds.setdefault(self.kind(rig, edit), deque(maxlen=REMEMBERED)).append(seconds)
        self._last = (rig, edit)


class ForecastRequest(Struct, frozen=True):
    """A forecast to compute.

    `owner`: the `EditState` for which the forecast is computed.
    `tables`: values that all previews of the model share. `pace`: durations of earlier forecasts for the model.
    `answered`: the last answer of the model. Its measured speed corrects the predicted speed; None if there is none.
    """

    owner: object
    tables: PreviewCache
    pace: Pace
    rig: Rig
    edit: Edit
    speeds: Speeds
    answered: MeasuredAnswer | None


class Forecast(Struct, frozen=True):
    """A computed forecast: the plan with its memory and speed, and its preview.

    Numbers that llama.cpp reported in a probe replace estimated ones. `seconds`: processor time of the computation.
    """

    request: ForecastRequest
    plan: Plan
    preview: Preview
    seconds: float


class Forecaster:
    """Computes forecasts of memory and speed: quick ones in the GUI thread, slow ones in the background.

    Of the requests that wait, only the newest is computed.
    `show`: called in the GUI thread with each forecast. If `is_behind` is true in this call, a newer one was requested.
    `probes`: memory numbers that llama.cpp has reported for plans; they replace estimated ones.
    `background`: if it is None, every forecast is computed before `request` returns.
    """

    def __init__(self, probes: ProbeCache, show: Callable[[Forecast], None], background: Background | None) -> None:
        self._probes = probes
        self._show = show
        self._background = background
        self._running: ForecastRequest | None = None
        self._waiting: ForecastRequest | None = None

    @property
    def is_behind(self) -> bool:
        """Whether the newest requested forecast has not been computed yet."""
        return self._waiting is not None

    def request(self, request: ForecastRequest) -> None:
        """Compute a forecast now, or as soon as the forecast that runs in a background thread has ended.

        An earlier request that has not begun yet is dropped.
        """
        self._waiting = request
        self._go_on()

    def forget(self) -> None:
        """Drop the waiting request, because no model is open."""
        self._waiting = None

    def _go_on(self) -> None:
        request = self._waiting
        if request is None:
            return
        # The background thread uses the tables of this model. `_on_done` calls this method again.
        if self._running is not None and (self._running is request or self._running.tables is request.tables):
            return
        if self._background is None or request.pace.is_quick(request.rig, request.edit):
            self._waiting = None
            self._take(self._compute(request))
        elif self._running is None:
            # The request also stays in `_waiting`, so that `is_behind` is true until the result arrives.
            self._running = request
            self._background.run("Forecasting", lambda: self._try(request), self._on_done, _unexpected, quiet=True)

    def _on_done(self, found: Forecast | Exception) -> None:
        request, self._running = self._running, None
        if self._waiting is request:
            self._waiting = None
        try:
            if isinstance(found, Exception):
                raise found
            self._take(found)
        finally:
            # Also after an exception, or a waiting request would never start.
            self._go_on()

    def _take(self, forecast: Forecast) -> None:
        request = forecast.request
        request.pace.note(request.rig, request.edit, forecast.seconds)
        self._show(forecast)

    def _try(self, request: ForecastRequest) -> Forecast | Exception:
        try:
            return self._compute(request)
        except Exception as error:  # A bug: it is raised in the GUI thread, and the next request is computed.
            return error

    def _compute(self, request: ForecastRequest) -> Forecast:
        # Processor time of this thread: other programs must not make a quick computation look slow.
        begun_s = thread_time()
        with limited(PREVIEW_SECONDS):
            # Probed numbers replace estimated ones before the preview is made.
            plan = self._probes.over(Plan(request.tables.memory, request.rig, request.edit))
            preview = make_preview(request.tables, plan, request.speeds, request.answered)
        return Forecast(request, plan, preview, thread_time() - begun_s)


def _unexpected(error: EngineError) -> None:
    """Raise `error`. `Background.run` requires this callback, but `_try` returns errors as results."""
    raise error
