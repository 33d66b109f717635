"""Computes plans as they are drawn: at once, or beside the GUI thread where that took long of late.

A model's tables are for one thread at a time. While they are used beside, what is asked of them waits, and of several
that wait the newest counts.
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
from engine.planning.memory.effort import limited
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import Preview, PreviewTables, make_preview
from engine.planning.speed.speeds import Speeds
from engine.runtime.probing.probe import ProbeCache

DIRECT_S = 0.005
"""Of the processor: what took no longer of late is computed in the GUI thread, which then shows it at once."""
PREVIEW_SECONDS = 0.5
"""Of the processor for the arithmetic of one preview; what takes longer is left to the engine, which a probe asks."""


REMEMBERED = 8
"""Of so many of a kind the slowest counts: steps of a drag take long again and again, wherever a part is new."""


class Pace:
    """How long the last computations of each kind took for one model; `first_s`: its first one, made elsewhere.

    For the GUI thread alone.
    """

    def __init__(self, first_s: float = 0.0) -> None:
        self._seconds = {"first": deque([first_s], maxlen=REMEMBERED)}
        self._last: tuple[Rig, Edit] | None = None

    def kind(self, rig: Rig, edit: Edit) -> str:
        """Return what has changed since the last computation, of all that did what takes longest."""
        if self._last is None:
            return "first"
        before_rig, before = self._last
        if rig.ids != before_rig.ids:
            return "devices"
        if edit.context != before.context or edit.side_files != before.side_files:
            return "settings"
        return "layout" if edit.layout != before.layout else "memory"

    def is_quick(self, rig: Rig, edit: Edit) -> bool:
        """Say whether such computations took little of late; one that was never done is judged by all others.

        The first is taken for quick: it is of tables that have seen it.
        """
        if self._last is None:
            return True
        known = self._seconds.get(self.kind(rig, edit)) or chain.from_iterable(self._seconds.values())
        return max(known) <= DIRECT_S

    def note(self, rig: Rig, edit: Edit, seconds: float) -> None:
        """Remember how long a computation took."""
        self._seconds.setdefault(self.kind(rig, edit), deque(maxlen=REMEMBERED)).append(seconds)
        self._last = (rig, edit)


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be drawn. `owner` is who asks: answers for another one are of no use to it."""

    owner: object
    tables: PreviewTables
    pace: Pace
    rig: Rig
    edit: Edit
    speeds: Speeds
    answered_per_second: float | None


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan, with what was probed of it, and as it is drawn. `seconds`: what that took of the processor."""

    question: Question
    plan: Plan
    preview: Preview
    seconds: float


class Forecaster:
    """Answers the newest question; `show` is called in the GUI thread, for older ones too: see `is_behind`.

    Without `background` everything is computed at once.
    """

    def __init__(self, probes: ProbeCache, show: Callable[[Answer], None], background: Background | None) -> None:
        self._probes = probes
        self._show = show
        self._background = background
        self._running: Question | None = None
        self._waiting: Question | None = None

    @property
    def is_behind(self) -> bool:
        """Whether what was asked last has no answer yet."""
        return self._waiting is not None

    def ask(self, question: Question) -> None:
        """Answer `question`, now or as soon as that can be."""
        self._waiting = question
        self._go_on()

    def forget(self) -> None:
        """Answer nothing of what was asked."""
        self._waiting = None

    def _go_on(self) -> None:
        question = self._waiting
        if question is None:
            return
        if self._running is not None and (self._running is question or self._running.tables is question.tables):
            return
        if self._background is None or question.pace.is_quick(question.rig, question.edit):
            self._waiting = None
            self._take(self._answer(question))
        elif self._running is None:
            self._running = question
            self._background.run("Forecasting", lambda: self._try(question), self._on_done, _unexpected, quiet=True)

    def _on_done(self, found: Answer | Exception) -> None:
        question, self._running = self._running, None
        if self._waiting is question:
            self._waiting = None
        try:
            if isinstance(found, Exception):
                raise found
            self._take(found)
        finally:
            self._go_on()

    def _take(self, answer: Answer) -> None:
        question = answer.question
        question.pace.note(question.rig, question.edit, answer.seconds)
        self._show(answer)

    def _try(self, question: Question) -> Answer | Exception:
        try:
            return self._answer(question)
        except Exception as error:  # A bug: raised in the GUI thread, after which the next question is answered.
            return error

    def _answer(self, question: Question) -> Answer:
        begun_s = thread_time()
        with limited(PREVIEW_SECONDS):
            plan = self._probes.over(Plan(question.tables.memory, question.rig, question.edit))
            preview = make_preview(question.tables, plan, question.speeds, question.answered_per_second)
        return Answer(question, plan, preview, thread_time() - begun_s)


def _unexpected(error: EngineError) -> None:
    """`_try` gives every error back as its result."""
    raise error
