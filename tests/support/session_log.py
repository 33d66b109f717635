"""A session that records its events, with waits on conditions instead of sleeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from engine.devices.device import ComputingNeed
from engine.runtime.protocol.messages import DeviceMemoryReadings
from engine.runtime.session.driver import SessionUpdate
from engine.runtime.session.events import AnyEvent, Attempt, Fallback, Progress, Reading, Token
from engine.runtime.session.session import ModelSession
from engine.runtime.session.snapshot import Snapshot
from engine.runtime.session.status import Phase
from tests.support.patience import DEADLINE_S

LOOK_S = 0.05


class SessionLog:
    """A session, and everything that it has reported.

    `endings`: events without progress, tokens, attempts and fallbacks.
    `on_event`: called with each event.
    `phases`: phases of the snapshots, without repetitions.
    """

    def __init__(self, argv: Sequence[str] | None = None, **options: Any) -> None:
        self._condition = threading.Condition()
        self.events: list[AnyEvent] = []
        self.phases: list[Phase] = []
        self.needs: list[ComputingNeed] = []
        self.on_event: Callable[[AnyEvent], None] | None = None
        self.on_device_memory: Callable[[DeviceMemoryReadings], None] | None = None
        self.session = ModelSession(self._take, argv=argv, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()

    @property
    def endings(self) -> list[AnyEvent]:
        with self._condition:
            return [
                event for event in self.events if not isinstance(event, Progress | Reading | Token | Attempt | Fallback)
            ]

    def wait_for_endings(self, count: int) -> list[AnyEvent]:
        """Wait for `count` endings, and return them."""
        self.wait_until(lambda: len(self.endings) >= count)
        return self.endings

    def wait_for_event(self, wanted: type[AnyEvent], **fields: object) -> AnyEvent:
        """Wait for an event of this type with these fields; return the first one."""

        def matches(event: AnyEvent) -> bool:
            return isinstance(event, wanted) and all(getattr(event, key) == value for key, value in fields.items())

        self.wait_until(lambda: any(matches(event) for event in self.events))
        return next(event for event in self.events if matches(event))

    def wait_for_phase(self, phase: Phase) -> None:
        """Wait until the session is in `phase`."""
        self.wait_until(lambda: self.session.snapshot.phase is phase)

    def wait_until(self, condition: Callable[[], bool], *, quietly: bool = False) -> None:
        """Wait until `condition` holds.

        It is checked after each report of the session; with `quietly` also in between.
        """
        deadline_s = time.monotonic() + DEADLINE_S
        with self._condition:
            while not self._condition.wait_for(condition, LOOK_S if quietly else DEADLINE_S):
                assert time.monotonic() < deadline_s, f"still waiting; so far {self.events}, {self.phases}"

    def _take(self, news: SessionUpdate) -> None:
        if isinstance(news, ComputingNeed):
            self.needs.append(news)
            return
        if isinstance(news, DeviceMemoryReadings):
            if self.on_device_memory is not None:
                self.on_device_memory(news)
            return
        with self._condition:
            if not isinstance(news, Snapshot):
                self.events.append(news)
            elif self.phases[-1:] != [news.phase]:
                self.phases.append(news.phase)
            self._condition.notify_all()
        if self.on_event is not None and not isinstance(news, Snapshot):
            self.on_event(news)
