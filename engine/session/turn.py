"""One turn of the machine: the state as it changes, and the effects that come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.protocol.messages import AnyRequest
from engine.session import effects
from engine.session.effects import Effect
from engine.session.events import AnyEvent
from engine.session.state import Child, LoadRun, State, Step


class Turn:
    """Lives as long as one call of `advance`; what it ends with is what that returns."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.effects: list[Effect] = []

    def change(self, **fields: Any) -> None:
        self.state = replace(self.state, **fields)

    def change_load(self, **fields: Any) -> None:
        self.change(load=replace(self.load, **fields))

    def change_child(self, **fields: Any) -> None:
        self.change(child=replace(self.child, **fields))

    @property
    def load(self) -> LoadRun:
        """The load that runs, where there must be one."""
        assert self.state.load is not None
        return self.state.load

    @property
    def child(self) -> Child:
        """The child, where there must be one."""
        assert self.state.child is not None
        return self.state.child

    def do(self, effect: Effect) -> None:
        self.effects.append(effect)

    def tell(self, event: AnyEvent) -> None:
        self.do(effects.Tell(event))

    def number(self) -> int:
        """Return a number that was not given before."""
        self.change(numbers=self.state.numbers + 1)
        return self.state.numbers

    def send(self, request: AnyRequest) -> None:
        self.do(effects.Send(self.child.id, request))

    def watch(self, active: bool) -> None:
        """Watch the child for silence, or no more."""
        if self.state.child is not None and not self.state.child.ending:
            self.do(effects.Watch(self.state.child.id, active))

    def stop_child(self) -> None:
        """Ask the child to end; asked once is enough."""
        if not self.child.ending:
            self.do(effects.StopChild(self.child.id))
            self.change_child(ending=True)

    def await_work(self, step: Step, work: Callable[[int], effects.Work]) -> None:
        """Take the load to `step`, in which it waits for `work`, made for its ticket."""
        ticket = self.number()
        self.change_load(step=step, ticket=ticket)
        self.do(work(ticket))

    def take_answer(self, ticket: int) -> bool:
        """Return whether the load waits for this ticket; from now on it does not."""
        if self.state.load is None or self.state.load.ticket != ticket:
            return False
        self.change_load(ticket=None)
        return True
