"""The machine, story by story: what a load and a request are promised, without a process or a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.errors import ArgumentError
from engine.process.outcome import EndReason, ProcessOutcome
from engine.protocol.messages import (
    AnyMessage,
    DeviceMemoryQuery,
    Failure,
    Generate,
    Piece,
    Stop,
    Tokenise,
    Tokenised,
)
from engine.session import effects, inputs
from engine.session.events import AnyEvent, Attempt, Cancelled, Crashed, Done, Failed, Loaded, OutOfMemory, Token
from engine.session.load_order import LoadOrder, RetryPolicy
from engine.session.machine import advance
from engine.session.snapshot import Snapshot, snapshot_of
from engine.session.state import RequestState, State
from engine.session.status import Phase
from tests.engine.session.world import LOAD_REQUEST, LOADED, generated, refused_memory
from tests.support.orders import make_order, worker_device

STOPPED = ProcessOutcome(EndReason.STOPPED, exit_code=0)
KILLED = ProcessOutcome(EndReason.ITSELF, signal=9)
ENDPOINT = "192.0.2.1:50052"


class Story:
    """Tells the machine one thing after another; `done` is what came of the last one."""

    def __init__(self) -> None:
        self.state = State()
        self.done: tuple[effects.Effect, ...] = ()
        self.events: list[AnyEvent] = []

    @property
    def snapshot(self) -> Snapshot:
        return snapshot_of(self.state)

    def put(self, *events: inputs.Input) -> Sequence[effects.Effect]:
        for event in events:
            self.state, self.done = advance(self.state, event)
            self.events += [each.event for each in self.done if isinstance(each, effects.Tell)]
        return self.done

    def said(self, *messages: AnyMessage) -> Sequence[effects.Effect]:
        assert self.state.child is not None
        return self.put(*(inputs.ChildSaid(self.state.child.id, message) for message in messages))

    def ended(self, outcome: ProcessOutcome) -> Sequence[effects.Effect]:
        assert self.state.child is not None
        return self.put(inputs.ChildEnded(self.state.child.id, outcome))

    @property
    def ticket(self) -> int:
        assert self.state.load is not None
        assert self.state.load.ticket is not None
        return self.state.load.ticket

    def prepared(self) -> None:
        """The layout may be loaded."""
        assert self.state.load is not None
        self.put(inputs.Prepared(self.ticket, self.state.load.plan, LOAD_REQUEST))

    def loaded(self, order: LoadOrder | None = None) -> Story:
        """Load a model that needs no worker."""
        self.put(inputs.Load(order or make_order()))
        self.prepared()
        self.said(LOADED)
        assert self.snapshot.phase is Phase.READY
        self.events.clear()
        return self

    @property
    def endings(self) -> list[AnyEvent]:
        return [
            each for each in self.events if isinstance(each, Loaded | Done | OutOfMemory | Failed | Crashed | Cancelled)
        ]


def test_a_load_that_waits_behind_an_answer_that_fails_is_not_forgotten() -> None:
    story = Story().loaded()
    story.put(inputs.Ask(Generate(prompt="x")), inputs.Load(make_order()))
    assert story.snapshot.pending is not None
    assert story.snapshot.pending.waits == "an answer is being stopped"
    story.said(Failure(kind="internal", message="No.", request=0))
    assert [type(each) for each in story.endings] == [Failed]
    assert isinstance(story.done[-1], effects.Prepare)
    assert story.snapshot.pending is not None
    assert story.snapshot.pending.waits == ""


def test_a_load_that_waits_behind_an_answer_whose_child_dies_is_not_forgotten() -> None:
    story = Story().loaded()
    story.put(inputs.Ask(Generate(prompt="x")), inputs.Load(make_order()))
    story.ended(KILLED)
    assert [type(each) for each in story.endings] == [Crashed]
    assert story.endings[0].request == 0  # type: ignore[union-attr]
    assert isinstance(story.done[-1], effects.Prepare)


def test_what_is_loaded_stays_while_the_new_layout_is_checked_and_its_workers_are_asked() -> None:
    story = Story().loaded()
    before = story.snapshot.loaded
    story.put(inputs.Load(make_order([worker_device("attic", ENDPOINT)])))
    story.prepared()
    assert story.snapshot.loaded is before
    assert isinstance(story.done[-1], effects.Greet)
    story.put(inputs.StopAll())
    assert story.endings == [Cancelled(stage="fit")]
    assert story.snapshot.loaded is before
    assert story.snapshot.is_ready


def test_a_second_load_takes_the_place_of_the_one_that_waits() -> None:
    story = Story()
    first, second, third = make_order(), make_order(), make_order()
    story.put(inputs.Load(first), inputs.Prepared(1, first.plan, LOAD_REQUEST), inputs.Load(second), inputs.Load(third))
    assert story.endings == [Cancelled(stage="header")]
    assert story.snapshot.pending is not None
    assert story.snapshot.pending.order is third
    assert story.snapshot.pending.waits == "the load before it is being stopped"
    story.ended(STOPPED)
    assert [type(each) for each in story.endings] == [Cancelled, Cancelled]
    assert story.state.load is not None
    assert story.state.load.asked is third


def test_requests_run_beside_each_other_and_end_one_by_one() -> None:
    story = Story().loaded()
    story.put(inputs.Ask(Generate(prompt="a")), inputs.Ask(Tokenise(text="b")), inputs.Ask(Generate(prompt="c")))
    assert [run.id for run in story.snapshot.requests] == [0, 1, 2]
    story.said(Piece(request=2, text="c"), Tokenised(request=1, tokens=(1,), pieces=("b",)), generated(0))
    assert [run.id for run in story.snapshot.requests] == [2]
    assert story.snapshot.requests[0].state is RequestState.ANSWERING
    assert [getattr(each, "request", None) for each in story.events] == [2, 1, 0]
    assert not any(isinstance(each, effects.Watch) for each in story.done)
    story.said(generated(2), Piece(request=2, text="too late"))
    assert story.snapshot.is_ready
    assert sum(isinstance(each, Token) for each in story.events) == 1


def test_a_request_that_does_not_stop_costs_no_other_one() -> None:
    story = Story().loaded()
    story.put(inputs.Ask(Generate(prompt="a")), inputs.Ask(Generate(prompt="b")))
    assert story.put(inputs.StopRequest(0)) == (effects.Send(story.state.child.id, Stop(request=0)),)  # type: ignore[union-attr]
    story.said(generated(1))
    assert isinstance(story.done[-1], effects.SetTimer)
    story.put(inputs.TimerRang(story.done[-1].timer))
    assert isinstance(story.done[-1], effects.KillChild)
    story.said(generated(0))
    story.ended(STOPPED)
    assert [type(each) for each in story.endings] == [Done, Failed]
    assert story.endings[1].kind == "stalled"
    assert story.snapshot.phase is Phase.FAILED


def test_a_child_that_is_lost_with_requests_under_way_ends_each_of_them() -> None:
    story = Story().loaded()
    story.put(inputs.Ask(Generate(prompt="a")), inputs.Ask(Generate(prompt="b")))
    story.ended(KILLED)
    assert [(type(each), getattr(each, "request", None)) for each in story.endings] == [(Crashed, 0), (Crashed, 1)]
    assert story.snapshot.loaded is None


def test_retries_go_on_until_a_layout_loads() -> None:
    story = Story()
    order = replace(make_order(), retry=RetryPolicy(2))
    story.put(inputs.Load(order), inputs.Prepared(1, order.plan, LOAD_REQUEST))
    story.put(inputs.Forecasted(story.ticket, order.plan, fits=False))
    story.put(inputs.Chosen(story.ticket, None))  # Nothing else to try: a forecast refuses nothing.
    assert isinstance(story.done[-1], effects.StartChild)
    story.said(refused_memory(None))
    assert isinstance(story.done[-1], effects.StopChild)
    assert story.endings == []
    story.ended(STOPPED)
    assert isinstance(story.done[-1], effects.Choose)
    story.put(inputs.Chosen(story.ticket, None))
    assert isinstance(story.done[-1], effects.Explain)
    story.put(inputs.StopAll())
    assert story.endings == []
    story.put(inputs.Explained(story.ticket, (), ()))
    assert [type(each) for each in story.endings] == [OutOfMemory]
    assert sum(isinstance(each, Attempt) for each in story.events) == 1
    assert "refused" in story.snapshot.attempts[-1].outcome


@pytest.mark.parametrize("moment", ["nothing loaded", "loading", "unloading", "closed"])
def test_a_request_is_refused_where_no_model_is_ready(moment: str) -> None:
    story = Story() if moment == "nothing loaded" else Story().loaded()
    if moment == "loading":
        story.put(inputs.Load(make_order()))
    elif moment == "unloading":
        story.put(inputs.Unload())
    elif moment == "closed":
        story.put(inputs.Close())
    before = story.state
    with pytest.raises(ArgumentError, match="being loaded" if moment == "loading" else "load one first"):
        story.put(inputs.Ask(Generate(prompt="x")))
    assert story.state is before


def test_memory_may_be_asked_for_beside_an_answer() -> None:
    story = Story().loaded()
    story.put(inputs.Ask(Generate(prompt="x")), inputs.QueryMemory())
    assert story.done == (effects.Send(story.state.child.id, DeviceMemoryQuery()),)  # type: ignore[union-attr]
