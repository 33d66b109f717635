"""What a runner told, kept in order, with waits on conditions instead of sleeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, TypeVar

from engine.runner.client import Runner, RunnerState
from engine.runner.events import AnyEvent, Attempt, Progress, Token
from engine.runner.load_loop import LoadLoop
from tests.support.patience import DEADLINE_S

LOOK_S = 0.05

_R = TypeVar("_R", Runner, LoadLoop)


class EventLog(Generic[_R]):
    """A runner with everything it told. `endings` leaves progress, tokens and attempts out; `on_event` gets all."""

    def __init__(self, make: Callable[..., _R], options: dict[str, Any]) -> None:
        self._condition = threading.Condition()
        self.events: list[AnyEvent] = []
        self.states: list[RunnerState] = []
        self.on_event: Callable[[AnyEvent], None] | None = None
        self.runner: _R = make(self._take_event, on_state=self._take_state, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.close()

    @property
    def endings(self) -> list[AnyEvent]:
        with self._condition:
            return [event for event in self.events if not isinstance(event, Progress | Token | Attempt)]

    def wait_for_endings(self, count: int) -> list[AnyEvent]:
        """Wait until there are `count` endings and return them."""
        self.wait_until(lambda: len(self.endings) >= count)
        return self.endings

    def wait_for_event(self, wanted: type[AnyEvent], **fields: object) -> AnyEvent:
        """Wait for an event of this type with these fields and return the first."""

        def matches(event: AnyEvent) -> bool:
            return isinstance(event, wanted) and all(getattr(event, key) == value for key, value in fields.items())

        self.wait_until(lambda: any(matches(event) for event in self.events))
        return next(event for event in self.events if matches(event))

    def wait_for_state(self, state: RunnerState) -> None:
        """Wait until the runner is in `state` now."""
        self.wait_until(lambda: self.runner.state is state)

    def wait_until(self, condition: Callable[[], bool], *, quietly: bool = False) -> None:
        """Wait until `condition`, looked at after each event and state, holds; `quietly` also looks without any."""
        deadline_s = time.monotonic() + DEADLINE_S
        with self._condition:
            while not self._condition.wait_for(condition, LOOK_S if quietly else DEADLINE_S):
                assert time.monotonic() < deadline_s, f"still waiting; so far {self.events}, {self.states}"

    def _take_event(self, event: AnyEvent) -> None:
        with self._condition:
            self.events.append(event)
            self._condition.notify_all()
        if self.on_event is not None:
            self.on_event(event)

    def _take_state(self, state: RunnerState) -> None:
        with self._condition:
            self.states.append(state)
            self._condition.notify_all()


class RunnerLog(EventLog[Runner]):
    """A runner that loads what it is given, once."""

    def __init__(self, argv: Sequence[str] | None = None, **options: Any) -> None:
        super().__init__(Runner, {"argv": argv, **options})


class LoopLog(EventLog[LoadLoop]):
    """A runner with the load loop around it."""

    def __init__(self, argv: Sequence[str] | None = None, **options: Any) -> None:
        super().__init__(LoadLoop, {"argv": argv, **options})
