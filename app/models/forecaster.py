"""Computes plans for drawing: in the GUI thread if that was quick recently, else in the background.

A model's tables are for one thread at a time. While the background uses them, a new request waits; a newer one takes
its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from time import thread_time

from app.background import Background
from engine.base.errors import EngineError
from engine.devices.device import Rig
from engine.planning.memory.work_limit import limited
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import Preview, PreviewTables, make_preview
from engine.planning.speed.prediction import LastAnswer
from engine.planning.speed.speeds import Speeds
from engine.runtime.probing.probe import ProbeCache

DIRECT_S = 0.005
"""Processor time up to which computations stay in the GUI thread, which then shows the result at once."""
PREVIEW_SECONDS = 0.5
"""Processor time for one preview. Numbers that need more are left to a probe."""


REMEMBERED = 8
"""Durations kept of each kind. The slowest counts, since some steps of a drag compute new parts and others do not."""


class Pace:
    """Durations of the last computations for one model, by kind. `first_s`: that of the first one, made elsewhere.

    For the GUI thread only.
    """

    def __init__(self, first_s: float = 0.0) -> None:
        self._seconds = {"first": deque([first_s], maxlen=REMEMBERED)}
        self._last: tuple[Rig, Edit] | None = None

    def kind(self, rig: Rig, edit: Edit) -> str:
        """Return the kind of change since the last computation; of several, the slowest one."""
        if self._last is None:
            return "first"
        before_rig, before = self._last
        if rig.ids != before_rig.ids:
            return "devices"
        if edit.context != before.context or edit.side_files != before.side_files:
            return "settings"
        return "layout" if edit.layout != before.layout else "memory"

    def is_quick(self, rig: Rig, edit: Edit) -> bool:
        """Return whether computations of this kind were quick; a new kind is judged by all others.

        The first one counts as quick, since the tables have computed it already.
        """
        if self._last is None:
            return True
        known = self._seconds.get(self.kind(rig, edit)) or chain.from_iterable(self._seconds.values())
        return max(known) <= DIRECT_S

    def note(self, rig: Rig, edit: Edit, seconds: float) -> None:
        """Add the duration of a computation."""
        self._seconds.setdefault(self.kind(rig, edit), deque(maxlen=REMEMBERED)).append(seconds)
        self._last = (rig, edit)


@dataclass(frozen=True, slots=True)
class ForecastRequest:
    """A plan to be computed. `owner`: the caller's edit state, by which it recognises its forecasts."""

    owner: object
    tables: PreviewTables
    pace: Pace
    rig: Rig
    edit: Edit
    speeds: Speeds
    answered: LastAnswer | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """A plan with its probed numbers, and its preview. `seconds`: processor time that it took."""

    request: ForecastRequest
    plan: Plan
    preview: Preview
    seconds: float


class Forecaster:
    """Computes the newest request. `show` is called in the GUI thread, for older ones as well: see `is_behind`.

    Without `background` everything is computed at once.
    """

    def __init__(self, probes: ProbeCache, show: Callable[[Forecast], None], background: Background | None) -> None:
        self._probes = probes
        self._show = show
        self._background = background
        self._running: ForecastRequest | None = None
        self._waiting: ForecastRequest | None = None

    @property
    def is_behind(self) -> bool:
        """Whether the newest request has no forecast yet."""
        return self._waiting is not None

    def request(self, request: ForecastRequest) -> None:
        """Compute `request`, now or as soon as the tables are free."""
        self._waiting = request
        self._go_on()

    def forget(self) -> None:
        """Drop the waiting request."""
        self._waiting = None

    def _go_on(self) -> None:
        request = self._waiting
        if request is None:
            return
        if self._running is not None and (self._running is request or self._running.tables is request.tables):
            return
        if self._background is None or request.pace.is_quick(request.rig, request.edit):
            self._waiting = None
            self._take(self._compute(request))
        elif self._running is None:
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
    """Never called: `_try` returns errors as results."""
    raise error
