"""The state machine of a session, driven by hand and by random inputs: effects of each, and invariants."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from engine.base.errors import ArgumentError
from engine.base.units import MIB
from engine.base.values import replace
from engine.model.gguf.reader import read_model
from engine.planning.fit.step_back import NextLayout, Refusal
from engine.planning.layout.layout import single_device
from engine.planning.memory.drafts import Draft
from engine.planning.memory.side_files import SideFiles
from engine.planning.plan.plan import Plan
from engine.runtime.process.outcome import EndReason, ProcessOutcome
from engine.runtime.protocol.messages import AnyMessage, Failure, Piece, Reading, StageProgress, Tokenised
from engine.runtime.protocol.requests import DeviceMemoryQuery, Generate, Stop, Tokenise
from engine.runtime.session import effects, inputs
from engine.runtime.session.events import (
    AnyEvent,
    Attempt,
    Cancelled,
    Crashed,
    Done,
    Failed,
    Loaded,
    OutOfMemory,
    Token,
)
from engine.runtime.session.events import Reading as ReadingEvent
from engine.runtime.session.load_spec import LoadSpec, RetryPolicy
from engine.runtime.session.machine import advance
from engine.runtime.session.snapshot import Snapshot, snapshot_of
from engine.runtime.session.state import RequestState, State, Step
from engine.runtime.session.status import Phase
from tests.engine.runtime.session.world import LOAD_REQUEST, LOADED, Choose, World, generated, refused_memory
from tests.support.load_specs import N_LAYERS, holding, make_spec, worker_device
from tests.support.models import write_tiny_llama

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
            self.events += [each.event for each in self.done if isinstance(each, effects.Report)]
        return self.done

    def said(self, *messages: AnyMessage) -> Sequence[effects.Effect]:
        assert self.state.child is not None
        return self.put(*(inputs.ChildMessage(self.state.child.id, message) for message in messages))

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

    def loaded(self, spec: LoadSpec | None = None) -> Story:
        """Load a model that needs no worker."""
        self.put(inputs.Load(spec or make_spec()))
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
    story.put(inputs.SubmitRequest(Generate(prompt="x")), inputs.Load(make_spec()))
    assert story.snapshot.pending is not None
    assert story.snapshot.pending.waits == "an answer is being stopped"
    story.said(Failure(kind="internal", message="No.", request=0))
    assert [type(each) for each in story.endings] == [Failed]
    assert isinstance(story.done[-1], effects.Prepare)
    assert story.snapshot.pending is not None
    assert story.snapshot.pending.waits == ""


def test_a_load_that_waits_behind_an_answer_whose_child_dies_is_not_forgotten() -> None:
    story = Story().loaded()
    story.put(inputs.SubmitRequest(Generate(prompt="x")), inputs.Load(make_spec()))
    story.ended(KILLED)
    assert [type(each) for each in story.endings] == [Crashed]
    assert story.endings[0].request == 0  # type: ignore[union-attr]
    assert isinstance(story.done[-1], effects.Prepare)


def test_no_load_begins_beside_a_process_that_cannot_be_ended() -> None:
    story = Story().loaded()
    story.put(inputs.Load(make_spec()))
    story.prepared()
    assert story.snapshot.pending is not None
    assert story.snapshot.pending.waits == "the previous model is being unloaded"
    done = story.ended(ProcessOutcome(EndReason.BROKEN, detail="process 7 does not end, even when killed"))
    assert not [each for each in done if isinstance(each, effects.StartChild)]
    (ending,) = story.endings
    assert isinstance(ending, Failed)
    assert "process 7 does not end" in ending.message


@pytest.mark.parametrize("first", [inputs.SubmitRequest(Generate(prompt="a")), inputs.Unload()])
def test_no_waiting_load_begins_beside_a_process_that_cannot_be_ended(first: inputs.Input) -> None:
    story = Story().loaded()
    story.put(first)
    story.put(inputs.Load(make_spec()))
    done = [*story.ended(ProcessOutcome(EndReason.BROKEN, detail="process 7 does not end, even when killed"))]
    if story.state.load is not None:
        story.prepared()
        done += story.done
    assert not [each for each in done if isinstance(each, effects.StartChild)]
    assert isinstance(story.endings[-1], Failed)
    assert "process 7 does not end" in story.endings[-1].message


@pytest.mark.parametrize("first", [inputs.Unload(), inputs.Load(make_spec())])
def test_a_close_does_not_wait_as_long_as_an_unload(first: inputs.Input) -> None:
    story = Story().loaded()
    story.put(inputs.SubmitRequest(Generate(prompt="a")))
    (long,) = (each for each in story.put(first) if isinstance(each, effects.SetTimer))
    done = story.put(inputs.Close())
    assert effects.CancelTimer(long.timer) in done
    (short,) = (each for each in done if isinstance(each, effects.SetTimer))
    assert short.timeout_s < long.timeout_s


def test_a_stalled_load_says_how_far_it_was_and_uses_the_limit_of_its_order() -> None:
    stalled = ProcessOutcome(EndReason.STALLED, detail="90 s")
    for fraction, words in ((0.4, "reading the weights (40 % done)"), (None, "reading the weights.")):
        story = Story()
        spec = replace(make_spec(), stall_limit_s=90)
        story.put(inputs.Load(spec), inputs.Prepared(1, spec.plan, LOAD_REQUEST))
        assert isinstance(story.done[-1], effects.StartChild)
        assert story.done[-1].stall_limit_s == 90
        story.said(StageProgress(stage="read", fraction=fraction))
        story.ended(stalled)
        (ending,) = story.endings
        assert isinstance(ending, Failed)
        assert (ending.kind, "90 s" in ending.message, words in ending.message) == ("stalled", True, True)
        assert "Stall limit" in ending.message
    # A model that stalls while it answers has no load to tell of.
    story = Story().loaded()
    story.put(inputs.SubmitRequest(Generate(prompt="a")))
    story.ended(stalled)
    assert "had reached this stage" not in story.endings[-1].message  # type: ignore[union-attr]


def test_a_child_that_dies_in_the_load_of_the_draft_names_its_file(tmp_path: Path) -> None:
    small = read_model(write_tiny_llama(tmp_path / "small.gguf", n_layers=1))
    spec = make_spec()
    edit = replace(spec.plan.edit, side_files=SideFiles(draft=Draft("model", model=small)))
    spec = replace(spec, plan=Plan(spec.plan.memory, spec.plan.rig, edit))
    for is_draft in (False, True):
        story = Story()
        story.put(inputs.Load(spec), inputs.Prepared(1, spec.plan, LOAD_REQUEST))
        story.said(StageProgress(stage="read", fraction=0.5, draft=is_draft))
        story.ended(ProcessOutcome(EndReason.ITSELF, signal=11))
        (ending,) = story.endings
        assert isinstance(ending, Crashed)
        assert ("The engine process was running small.gguf." in ending.message) == is_draft


def test_what_is_loaded_stays_while_the_new_layout_is_checked_and_its_workers_are_asked() -> None:
    story = Story().loaded()
    before = story.snapshot.loaded
    story.put(inputs.Load(make_spec([worker_device("attic", ENDPOINT)])))
    story.prepared()
    assert story.snapshot.loaded is before
    assert isinstance(story.done[-1], effects.Greet)
    story.put(inputs.StopAll())
    assert story.endings == [Cancelled(stage="fit")]
    assert story.snapshot.loaded is before
    assert story.snapshot.is_ready


def test_a_model_lost_while_a_new_layout_is_checked_is_told_after_a_cancel() -> None:
    story = Story().loaded()
    story.put(inputs.Load(make_spec([worker_device("attic", ENDPOINT)])))
    story.ended(KILLED)
    assert not story.endings
    story.put(inputs.StopAll())
    assert [type(each) for each in story.endings] == [Cancelled, Crashed]
    assert story.snapshot.phase is Phase.FAILED


def test_a_loss_is_told_after_the_last_of_several_loads_was_cancelled() -> None:
    story = Story().loaded()
    story.put(inputs.Load(make_spec([worker_device("attic", ENDPOINT)])))
    story.ended(KILLED)
    story.put(inputs.Load(make_spec([worker_device("attic", ENDPOINT)])))
    assert [type(each) for each in story.endings] == [Cancelled]
    story.put(inputs.StopAll())
    assert [type(each) for each in story.endings] == [Cancelled, Cancelled, Crashed]
    assert story.snapshot.phase is Phase.FAILED
    assert story.state.lost is None


def test_a_second_load_takes_the_place_of_the_one_that_waits() -> None:
    story = Story()
    first, second, third = make_spec(), make_spec(), make_spec()
    story.put(inputs.Load(first), inputs.Prepared(1, first.plan, LOAD_REQUEST), inputs.Load(second), inputs.Load(third))
    assert story.endings == [Cancelled(stage="header")]
    assert story.snapshot.pending is not None
    assert story.snapshot.pending.spec is third
    assert story.snapshot.pending.waits == "the previous load is being stopped"
    story.ended(STOPPED)
    assert [type(each) for each in story.endings] == [Cancelled, Cancelled]
    assert story.state.load is not None
    assert story.state.load.asked is third


def test_requests_run_beside_each_other_and_end_one_by_one() -> None:
    story = Story().loaded()
    story.put(
        inputs.SubmitRequest(Generate(prompt="a")),
        inputs.SubmitRequest(Tokenise(text="b")),
        inputs.SubmitRequest(Generate(prompt="c")),
    )
    assert [run.id for run in story.snapshot.requests] == [0, 1, 2]
    story.said(Piece(request=2, text="c"), Tokenised(request=1, tokens=(1,), pieces=("b",)), generated(0))
    assert [run.id for run in story.snapshot.requests] == [2]
    assert story.snapshot.requests[0].state is RequestState.ANSWERING
    assert [getattr(each, "request", None) for each in story.events] == [2, 1, 0]
    assert not any(isinstance(each, effects.Watch) for each in story.done)
    story.said(generated(2), Piece(request=2, text="too late"))
    assert story.snapshot.is_ready
    assert sum(isinstance(each, Token) for each in story.events) == 1


TOKENISED = Reading(request=0, read_tokens=32, prompt_tokens=64)
TOKENISING = Reading(request=0, read_tokens=0, prompt_tokens=0)
BEGUN = Piece(request=0, text="the answer has begun")


def test_a_prompt_that_is_being_tokenised_is_not_being_read() -> None:
    """The API answered 200 for it, and then had to refuse the prompt."""
    story = Story().loaded()
    story.put(inputs.SubmitRequest(Generate(prompt="a")))
    story.said(TOKENISING)
    assert story.events == []
    assert story.snapshot.requests[0].state is RequestState.ASKED
    story.said(TOKENISED)
    assert [type(each) for each in story.events] == [ReadingEvent]


def test_a_stop_alone_never_costs_the_model() -> None:
    """One graph node of a large model may take a minute, and a load of it a quarter of an hour."""
    story = Story().loaded()
    story.put(inputs.SubmitRequest(Generate(prompt="a")))
    child = story.state.child.id  # type: ignore[union-attr]
    assert story.put(inputs.StopRequest(0)) == (effects.Send(child, Stop(request=0)),)
    assert story.snapshot.phase is Phase.STOPPING
    story.put(inputs.Load(make_spec()))
    timer = story.done[-1]
    assert isinstance(timer, effects.SetTimer)
    # The load is cancelled: nothing asks for the end of the model any more.
    assert effects.CancelTimer(timer.timer) in story.put(inputs.StopAll())
    assert story.put(inputs.TimerExpired(timer.timer)) == ()
    story.said(generated(0))
    assert story.snapshot.is_ready


@pytest.mark.parametrize(("on_card", "heard", "timeout_s"), [
    (False, TOKENISED, 2.0), (False, BEGUN, 2.0), (True, BEGUN, 2.0), (True, TOKENISED, 30.0),
    (False, None, 30.0), (False, TOKENISING, 30.0), (True, None, 30.0),
])  # fmt: skip
def test_what_cannot_be_interrupted_has_longer_to_stop(
    *, on_card: bool, heard: AnyMessage | None, timeout_s: float
) -> None:
    """A card computes the batch to its end, and a prompt is tokenised in one native call."""
    card = replace(worker_device("CUDA0", ""), backend="CUDA", endpoint=None)
    story = Story().loaded(make_spec([card] if on_card else ()))
    story.put(inputs.SubmitRequest(Generate(prompt="a")))
    if heard is not None:
        story.said(heard)
    story.put(inputs.StopRequest(0), inputs.Unload())
    timer = story.done[-1]
    assert isinstance(timer, effects.SetTimer)
    assert timer.timeout_s == timeout_s
    story.put(inputs.TimerExpired(timer.timer))
    story.ended(STOPPED)
    assert isinstance(story.endings[-1], Failed)
    assert f"did not stop within {timeout_s:g} s" in story.endings[-1].message


def test_a_model_that_is_closed_has_no_longer_time_to_stop() -> None:
    story = Story().loaded()
    story.put(inputs.SubmitRequest(Generate(prompt="a")), inputs.Close())
    assert isinstance(story.done[-1], effects.SetTimer)
    assert story.done[-1].timeout_s == 2.0


def test_a_request_that_does_not_stop_costs_no_other_one() -> None:
    story = Story().loaded()
    story.put(inputs.SubmitRequest(Generate(prompt="a")), inputs.SubmitRequest(Generate(prompt="b")))
    assert story.put(inputs.StopRequest(0)) == (effects.Send(story.state.child.id, Stop(request=0)),)  # type: ignore[union-attr]
    story.said(generated(1))
    story.put(inputs.Unload())
    assert isinstance(story.done[-1], effects.SetTimer)
    story.put(inputs.TimerExpired(story.done[-1].timer))
    assert isinstance(story.done[-1], effects.KillChild)
    story.said(generated(0))
    story.ended(STOPPED)
    stopped, unloaded = story.endings
    assert isinstance(stopped, Done)
    assert isinstance(unloaded, Failed)
    assert unloaded.kind == "stalled"
    assert story.snapshot.phase is Phase.FAILED


def test_a_child_that_is_lost_with_requests_under_way_ends_each_of_them() -> None:
    story = Story().loaded()
    story.put(inputs.SubmitRequest(Generate(prompt="a")), inputs.SubmitRequest(Generate(prompt="b")))
    story.ended(KILLED)
    assert [(type(each), getattr(each, "request", None)) for each in story.endings] == [(Crashed, 0), (Crashed, 1)]
    assert story.snapshot.loaded is None


def test_retries_go_on_until_a_layout_loads() -> None:
    story = Story()
    spec = replace(make_spec(), retry=RetryPolicy(2))
    story.put(inputs.Load(spec), inputs.Prepared(1, spec.plan, LOAD_REQUEST))
    story.put(inputs.Forecasted(story.ticket, spec.plan, fits=False))
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
    assert "could not allocate" in story.snapshot.attempts[-1].outcome


@pytest.mark.parametrize("moment", ["nothing loaded", "loading", "unloading", "closed"])
def test_a_request_is_refused_where_no_model_is_ready(moment: str) -> None:
    story = Story() if moment == "nothing loaded" else Story().loaded()
    if moment == "loading":
        story.put(inputs.Load(make_spec()))
    elif moment == "unloading":
        story.put(inputs.Unload())
    elif moment == "closed":
        story.put(inputs.Close())
    before = story.state
    with pytest.raises(ArgumentError, match="being loaded" if moment == "loading" else "load one first"):
        story.put(inputs.SubmitRequest(Generate(prompt="x")))
    assert story.state is before


def test_memory_may_be_asked_for_beside_an_answer() -> None:
    story = Story().loaded()
    story.put(inputs.SubmitRequest(Generate(prompt="x")), inputs.QueryMemory())
    assert story.done == (effects.Send(story.state.child.id, DeviceMemoryQuery()),)  # type: ignore[union-attr]


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
    assert {
        "KillChild",
        "CancelWork",
        "Explain",
        "Done",
        "Answered",
        "Crashed",
        "OutOfMemory",
        "Cancelled",
    } <= seen.keys()


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


MINE, IDLE = worker_device("RPC0", "attic:1"), worker_device("RPC1", "attic:2")
TAKEN = replace(worker_device("RPC2", "attic:3"), free_bytes=0, holdings=(holding("other", MIB),))
ORDER = make_spec((MINE, IDLE, TAKEN), single_device(N_LAYERS, "RPC0"))


def test_a_load_of_one_layout_keeps_to_its_workers() -> None:
    assert ORDER.possible_endpoints() == {"attic:1"}


def test_stepping_back_may_turn_to_workers_that_no_other_model_of_ours_has() -> None:
    assert replace(ORDER, retry=RetryPolicy(3)).possible_endpoints() == {"attic:1", "attic:2"}


EXHAUSTED = ProcessOutcome(
    EndReason.ITSELF, signal=6, abort_text="CUDA error", refusing_device="attic", free_bytes=5, requested_bytes=7
)


def test_an_answer_for_which_memory_ran_out_ends_with_proposals() -> None:
    story = Story().loaded()
    story.put(inputs.SubmitRequest(Generate(prompt="x")), inputs.SubmitRequest(Generate(prompt="y")))
    story.said(Piece(request=0, text="a"))
    story.ended(EXHAUSTED)
    assert story.endings == []
    (explain,) = [each for each in story.done if isinstance(each, effects.Explain)]
    assert explain.tried[0].refusal == Refusal("attic", 7, 5, 0)
    story.put(inputs.Explained(explain.ticket, (), ()))
    endings = cast("list[OutOfMemory]", story.endings)
    assert [(each.request, each.stage, each.requested_bytes, each.free_bytes) for each in endings] == [
        (0, "answer", 7, 5),
        (1, "answer", 7, 5),
    ]
    assert story.snapshot.phase is Phase.FAILED
    assert story.snapshot.loaded is None


def test_a_load_of_what_ran_out_of_memory_in_an_answer_steps_back_at_once() -> None:
    spec = replace(make_spec([worker_device("attic", "192.0.2.1:50052")]), retry=RetryPolicy(2))
    story = Story()
    story.put(inputs.Load(spec))
    story.prepared()
    story.put(inputs.Forecasted(story.ticket, spec.plan, fits=True))
    greet = story.ticket
    story.put(inputs.Greeted(greet, {}))
    story.said(LOADED)
    story.put(inputs.SubmitRequest(Generate(prompt="x")))
    story.ended(EXHAUSTED)
    # It may step back, so it ends without looking for proposals.
    ending = story.endings[-1]
    assert isinstance(ending, OutOfMemory)
    assert (ending.request, ending.stage, ending.proposals) == (0, "prompt", ())
    story.put(inputs.Load(spec))
    story.prepared()
    assert isinstance(story.done[-1], effects.Choose)
    assert story.done[-1].tried[0].layout == spec.plan.edit.layout
    story.put(inputs.Chosen(story.ticket, NextLayout(single_device(N_LAYERS, "CPU"), 1, "all layers to CPU")))
    attempt = next(each for each in reversed(story.events) if isinstance(each, Attempt))
    assert attempt.number == 2
    assert attempt.reason.startswith(
        "attic could not allocate 7 B with 5 B free while the prompt was read. Change for the next attempt: all layers"
    )
