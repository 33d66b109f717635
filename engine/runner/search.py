"""Asking RPC endpoints: before a load whether they answer, and after a loss which of them is gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from engine.devices.device import Device
from engine.runner.events import Crashed, Failed, Stage
from engine.runner.greeter import Greeter, Greetings
from engine.runner.inbox import Inbox
from engine.runner.outcome import ProcessOutcome
from engine.runner.reports import lost_event


@dataclass(eq=False, slots=True)
class Diagnosis:
    """A child went down, or stood still, over RPC; `finish` gets the ending that says which endpoint it was."""

    outcome: ProcessOutcome
    stage: Stage | None
    devices: Mapping[str, tuple[Device, ...]]
    finish: Callable[[Failed | Crashed], None]


class EndpointSearch:
    """Greets without waiting; results come back through the inbox. All calls from the inbox's thread, but `join`."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._greeter = Greeter()
        self._diagnosis: Diagnosis | None = None

    @property
    def is_diagnosing(self) -> bool:
        return self._diagnosis is not None

    def greet(self, endpoints: Sequence[str], then: Callable[[Greetings], None]) -> None:
        """Say hello; `then` is called with what they answered."""
        self._greeter.greet(endpoints, lambda greetings: self._inbox.put_result(partial(then, greetings)))

    def diagnose(self, diagnosis: Diagnosis) -> None:
        """Find out which endpoint is gone, then finish with that; `cut_short` finishes with what is known."""
        self._diagnosis = diagnosis
        self.greet(list(diagnosis.devices), partial(self._finish, diagnosis))

    def cut_short(self) -> bool:
        """Wait for no answers any more; return whether this finished a diagnosis."""
        self._greeter.cancel()
        if self._diagnosis is None:
            return False
        self._finish(self._diagnosis, {})
        return True

    def join(self) -> None:
        """Wait, bounded, for threads that still greet."""
        self._greeter.join()

    def _finish(self, diagnosis: Diagnosis, greetings: Greetings) -> None:
        if diagnosis is self._diagnosis:
            self._diagnosis = None
            diagnosis.finish(lost_event(diagnosis.outcome, diagnosis.stage, diagnosis.devices, greetings))
