"""The machine under random commands, messages, deaths, timeouts and closings: its promises hold whatever comes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from engine.session.state import Step
from engine.session.status import Phase
from tests.engine.session.world import Choose, World

T = TypeVar("T")

N_STEPS = 200_000
_LIFE_STEPS = 400
_EXAMPLES = 120
_EXAMPLE_STEPS = 60


def _chooser(data: st.DataObject) -> Choose[T]:
    def choose(options: Sequence[T]) -> T:
        return data.draw(st.sampled_from(options))

    return choose


class AnyOrder(RuleBasedStateMachine):
    """Finds a short story where a promise is broken."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        self.world.load(_chooser(data))

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        self.world.ask(_chooser(data))

    @rule(data=st.data())
    def stop_one(self, data: st.DataObject) -> None:
        self.world.stop_one(_chooser(data))

    @rule(name=st.sampled_from(("stop_all", "unload", "query_memory", "bug")))
    def command(self, name: str) -> None:
        getattr(self.world, name)()

    @rule(data=st.data())
    @precondition(lambda self: self.world.works)
    def work_ends(self, data: st.DataObject) -> None:
        self.world.work_ends(_chooser(data), _chooser(data))

    @rule(data=st.data())
    def child_says(self, data: st.DataObject) -> None:
        self.world.child_says(_chooser(data), _chooser(data), _chooser(data))

    @rule(data=st.data())
    @precondition(lambda self: self.world.children)
    def child_ends(self, data: st.DataObject) -> None:
        self.world.child_ends(_chooser(data))

    @rule(data=st.data())
    def timer_rings(self, data: st.DataObject) -> None:
        self.world.timer_rings(_chooser(data))

    @rule()
    def close(self) -> None:
        self.world.close()

    @rule()
    def come_to_rest(self) -> None:
        self.world.settle()

    def teardown(self) -> None:
        self.world.settle()
        self.world.close()
        self.world.settle()


def test_no_short_story_breaks_a_promise() -> None:
    run_state_machine_as_test(
        AnyOrder, settings=settings(max_examples=_EXAMPLES, stateful_step_count=_EXAMPLE_STEPS, deadline=None)
    )


@pytest.mark.exhaustive
def test_the_promises_hold_over_a_great_many_steps() -> None:
    """The same rules by plain chance, as often as hypothesis could not; every kind of moment is among them."""
    chance = random.Random(20)
    steps, lives, seen = 0, 0, Counter[str]()
    while steps < N_STEPS:
        world = World()
        _live(world, chance)
        steps, lives, seen = steps + world.steps, lives + 1, seen + world.seen
    assert steps >= N_STEPS
    never = {each.name for kind in (Phase, Step) for each in kind} - seen.keys()
    assert not never, f"{never} never came in {lives} lives"
    assert {"KillChild", "Abandon", "Explain", "Done", "Answered", "Crashed", "OutOfMemory", "Cancelled"} <= seen.keys()


def _live(world: World, chance: random.Random) -> None:
    """One model from the first load to its close."""
    pick = chance.choice
    rules: dict[Callable[[], None], int] = {
        lambda: world.load(pick): 5,
        lambda: world.ask(pick): 10,
        lambda: world.stop_one(pick): 4,
        world.stop_all: 1,
        world.unload: 1,
        world.query_memory: 1,
        world.bug: 1,
        lambda: world.timer_rings(pick): 5,
        lambda: world.child_ends(pick): 7,
        lambda: world.work_ends(pick, pick): 24,
        world.settle: 1,
        lambda: world.child_says(pick, pick, pick): 40,
    }
    while world.steps < _LIFE_STEPS:
        (happens,) = chance.choices(tuple(rules), tuple(rules.values()))
        happens()
    if chance.random() < 0.5:
        world.settle()
    world.close()
    for _ in range(20):
        world.load(pick)
        world.ask(pick)
        world.work_ends(pick, pick)
        world.child_says(pick, pick, pick)
    world.settle()
