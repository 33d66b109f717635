"""Simulated driver of a session's state machine: performs its effects in any order, and checks its invariants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import Struct, field

from engine.base.errors import ArgumentError
from engine.base.values import replace
from engine.devices.endpoint import Greeting, GreetingStatus
from engine.planning.fit.step_back import NextLayout
from engine.planning.layout.engine_parameters import EngineParameters
from engine.planning.layout.layout import single_device
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.process.outcome import EndReason, ProcessOutcome
from engine.runtime.protocol.messages import (
    AllocationFailure,
    AnyMessage,
    DeviceMemoryReadings,
    Failure,
    Generated,
    Hello,
    LoadedModel,
    LoadStage,
    Piece,
    StageProgress,
    Stopped,
    Tokenised,
)
from engine.runtime.protocol.messages import Reading as ReadingMessage
from engine.runtime.protocol.requests import AnyModelRequest, Generate, Load, Tokenise
from engine.runtime.session import effects, inputs
from engine.runtime.session.events import (
    Answered,
    AnyEvent,
    Attempt,
    Cancelled,
    Crashed,
    Done,
    Failed,
    Fallback,
    Loaded,
    OutOfMemory,
    Progress,
    Reading,
    Token,
)
from engine.runtime.session.load_spec import LoadSpec, RetryPolicy
from engine.runtime.session.machine import advance
from engine.runtime.session.snapshot import snapshot_of
from engine.runtime.session.state import State
from engine.runtime.session.status import Phase
from tests.support.load_specs import N_LAYERS, make_spec, worker_device

T = TypeVar("T")
Choose = Callable[[Sequence[T]], T]

AT_REST = (Phase.STOPPED, Phase.FAILED, Phase.READY)
_ATTIC, _CELLAR = worker_device("attic", "192.0.2.1:50052"), worker_device("cellar", "192.0.2.2:50052")
_PLAIN = make_spec()
_ORDERS = (
    _PLAIN,
    make_spec([_ATTIC]),
    make_spec([_ATTIC, _CELLAR]),
    replace(_PLAIN, retry=RetryPolicy(2)),
    replace(make_spec([_ATTIC, _CELLAR]), retry=RetryPolicy(2)),
)
LOAD_REQUEST = Load(
    path="made-up.gguf",
    devices=(),
    parameters=EngineParameters(n_gpu_layers=0, devices=(), tensor_split=(), split_mode="layer"),
    context=ContextSettings(n_ctx=512),
)

_STAGES: tuple[LoadStage, ...] = ("allocate", "read", "context", "warm_up")
_ABORT = ProcessOutcome(EndReason.ITSELF, signal=6, abort_text="Remote RPC server crashed")
_OUTCOMES = (
    ProcessOutcome(EndReason.ITSELF, signal=9),
    ProcessOutcome(EndReason.ITSELF, exit_code=0),
    ProcessOutcome(EndReason.STALLED, detail="60 s"),
    ProcessOutcome(EndReason.BROKEN, detail="it sent nonsense"),
    _ABORT,
    ProcessOutcome(EndReason.ITSELF, signal=6, abort_text="CUDA error", refusing_device="attic", free_bytes=1),
)
_STOPPED = ProcessOutcome(EndReason.STOPPED, exit_code=0)


class ChildFacts(Struct, dict=True):
    """A child that was started and has not ended."""

    plan: Plan
    asked_to_end: bool = False
    killed: bool = False


class World(Struct, dict=True):
    """Every input goes through `put`, which checks what comes of it."""

    state: State = field(default_factory=State)
    steps: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    children: dict[int, ChildFacts] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)
    works: dict[int, effects.Work] = field(default_factory=dict)
    abandoned: set[int] = field(default_factory=set)
    timers: set[int] = field(default_factory=set)
    old_timers: list[int] = field(default_factory=list)
    open_loads: int = 0
    open_requests: set[int] = field(default_factory=set)
    ended_requests: list[int] = field(default_factory=list)
    prepared: list[Plan] = field(default_factory=list)
    greeted: set[str] = field(default_factory=set)
    loss_to_tell: bool = False
    lost_before: Failed | Crashed | None = None
    """Loss of the model loaded before, which is told after the load that has not replaced it is cancelled."""
    unload_wanted: bool = False
    had_bug: bool = False
    closed: bool = False

    # ------------------------------------------------------------------ what may happen

    def load(self, choose: Choose[LoadSpec]) -> None:
        self._load(choose(_ORDERS))

    def _load(self, spec: LoadSpec) -> None:
        if self.put(inputs.Load(spec)):
            self.open_loads += 1
            self._check()
        else:
            assert self.closed

    def ask(self, choose: Choose[AnyModelRequest]) -> None:
        ready = self._is_ready_for_requests()
        request = choose((Generate(prompt="x"), Tokenise(text="x")))
        assert self.put(inputs.SubmitRequest(request)) is ready

    def stop_one(self, choose: Choose[int]) -> None:
        self.put(inputs.StopRequest(choose((*self.open_requests, *self.ended_requests[-2:], 99_999))))

    def stop_all(self) -> None:
        self.put(inputs.StopAll())

    def unload(self) -> None:
        self.unload_wanted = True
        self.put(inputs.Unload())

    def query_memory(self) -> None:
        self.put(inputs.QueryMemory())

    def close(self) -> None:
        self.closed = self.unload_wanted = True
        self.put(inputs.Close())

    def bug(self) -> None:
        self.had_bug = True
        self.put(inputs.Bug())

    def work_ends(self, choose: Choose[int], outcome: Choose[str]) -> None:
        """Some work reports, be it abandoned long ago."""
        if self.works:
            self._report(choose(tuple(self.works)), outcome(("good", "good", "good", "bad", "bug")))

    def child_says(self, choose: Choose[int], number: Choose[int], say: Choose[AnyMessage]) -> None:
        """A child says something, sensible or not; one that has ended may be heard late."""
        child = choose((*self.children, *self.children, *self.children, *self.gone[-1:], 99_999))
        of = number((*self.open_requests, *self.open_requests, *self.ended_requests[-1:], 99_999))
        self.put(inputs.ChildMessage(child, say(_messages(of))))

    def child_ends(self, choose: Choose[ProcessOutcome]) -> None:
        """A child that is there ends: as it was asked to, or by itself."""
        for child, facts in tuple(self.children.items()):
            self._end_child(child, choose((_STOPPED, _STOPPED, *_OUTCOMES) if facts.asked_to_end else _OUTCOMES))

    def timer_rings(self, choose: Choose[int]) -> None:
        timer = choose((*self.timers, *self.old_timers[-1:], 99_999))
        self.timers.discard(timer)
        self.old_timers.append(timer)
        self.put(inputs.TimerExpired(timer))

    # ------------------------------------------------------------------ coming to rest

    def settle(self) -> None:
        """Answer all that is asked for, until nothing happens any more; then nothing may be left open."""
        for _ in range(200):
            if self.works:
                self._report(next(iter(self.works)), "good")
            elif not self._serve_child():
                break
        phase = snapshot_of(self.state).phase
        assert phase in AT_REST, phase
        left = (self.open_loads, self.open_requests, self.loss_to_tell, self.timers, self.works)
        assert not any(left), left
        assert self.state.waiting is None
        assert snapshot_of(self.state).pending is None
        if self.closed:
            assert not self.children
            assert self.state.is_over

    def _serve_child(self) -> bool:
        """Do what a good child does next; return whether there was something."""
        for child, facts in tuple(self.children.items()):
            if facts.asked_to_end:
                self._end_child(child, _STOPPED)
            elif self.open_requests:
                self.put(inputs.ChildMessage(child, generated(min(self.open_requests))))
            elif self.state.loaded is None:
                self.put(inputs.ChildMessage(child, LOADED))
            else:
                return False
            return True
        return False

    # ------------------------------------------------------------------ one input

    def put(self, event: inputs.Input) -> bool:
        """Return whether it was taken, False where it was refused."""
        self.steps += 1
        before = self.state
        try:
            self.state, done = advance(before, event)
        except ArgumentError:
            assert isinstance(event, inputs.Load | inputs.SubmitRequest)
            assert self.state is before
            return False
        self.lost_before = before.lost
        for effect in done:
            self._perform(effect)
        if before.load is not None and self.state.last is not before.last and self.state.last is not None:
            told = self.lost_before is None or self.state.lost is self.lost_before
            assert told or not isinstance(self.state.last.ending, Cancelled), "a loss is told"
        assert self.state.lost is None or self.state.load is not None, "a loss is told after the last load"
        if not isinstance(event, inputs.Load):
            self._check()
        return True

    def _is_ready_for_requests(self) -> bool:
        state = self.state
        if self.open_loads or self.closed or state.unload_wanted or state.loss is not None or state.loaded is None:
            return False
        return not any(facts.asked_to_end for facts in self.children.values())

    def _report(self, ticket: int, how: str) -> None:
        work = self.works.pop(ticket)
        late = ticket in self.abandoned
        self.abandoned.discard(ticket)
        if how == "bug":
            self.had_bug = True
            self.put(inputs.WorkFailed(ticket))
        else:
            if how == "good" and isinstance(work, effects.Greet) and not late:
                self.greeted.update(work.endpoints)
            self.put(self._answer(ticket, work, how == "good"))

    def _answer(self, ticket: int, work: effects.Work, good: bool) -> inputs.Work:
        match work:
            case effects.Prepare():
                if not good:
                    return inputs.Refused(ticket, Failed(kind="layout", message="It breaks a rule."))
                self.prepared.append(work.plan)
                return inputs.Prepared(ticket, work.plan, LOAD_REQUEST)
            case effects.Forecast():
                return inputs.Forecasted(ticket, work.plan, fits=good)
            case effects.Choose():
                layout = single_device(N_LAYERS, ("attic", "cellar", "CPU")[len(work.tried) % 3])
                return inputs.Chosen(ticket, NextLayout(layout, 0, "something") if good else None)
            case effects.Greet():
                status = GreetingStatus.OK if good else GreetingStatus.REFUSED
                return inputs.Greeted(ticket, {each: Greeting(each, status, "It says.") for each in work.endpoints})
            case effects.Explain():
                return inputs.Explained(ticket, (), ())

    def _end_child(self, child: int, outcome: ProcessOutcome) -> None:
        facts = self.children.pop(child)
        self.gone.append(child)
        idle = not (self.open_loads or self.open_requests)
        self.loss_to_tell = self.loss_to_tell or (idle and not facts.asked_to_end)
        self.put(inputs.ChildEnded(child, outcome))

    # ------------------------------------------------------------------ what the machine does

    def _perform(self, effect: effects.Effect) -> None:
        self.seen[type(effect).__name__] += 1
        match effect:
            case effects.StartChild():
                assert not self.closed, "nothing starts after close"
                assert not self.children, "one child at a time"
                assert effect.child not in self.gone
                assert any(effect.plan is each for each in self.prepared), "a layout is checked before it is loaded"
                assert self.greeted.issuperset(effect.plan.used_endpoints)
                self.children[effect.child] = ChildFacts(effect.plan)
                self.unload_wanted = self.had_bug = False
            case effects.Send() | effects.Watch():
                assert not self._facts(effect.child).asked_to_end
            case effects.StopChild():
                self._stop_child(self._facts(effect.child))
            case effects.KillChild():
                facts = self._facts(effect.child)
                assert self.open_requests
                assert not facts.killed
                facts.killed = facts.asked_to_end = True
            case effects.CancelWork():
                assert effect.ticket in self.works
                self.abandoned.add(effect.ticket)
            case effects.SetTimer():
                assert not self.timers
                self.timers.add(effect.timer)
            case effects.CancelTimer():
                self.timers.remove(effect.timer)
                self.old_timers.append(effect.timer)
            case effects.Report():
                self._hear(effect.event)
            case effects.ReportMemory() | effects.ReportNeed():
                pass
            case _:
                assert not self.closed, "nothing starts after close"
                assert effect.ticket not in self.works
                self.works[effect.ticket] = effect
                if isinstance(effect, effects.Prepare):
                    self.greeted.clear()

    def _facts(self, child: int) -> ChildFacts:
        assert child in self.children, "a child that is gone is left alone"
        return self.children[child]

    def _stop_child(self, facts: ChildFacts) -> None:
        assert not facts.asked_to_end
        facts.asked_to_end = True
        load = self.state.load
        if load is None or load.plan is facts.plan or self.unload_wanted or self.had_bug:
            return
        # What was loaded stays until the new layout is tried for real.
        assert any(load.plan is each for each in self.prepared)
        assert self.greeted.issuperset(load.plan.used_endpoints.keys() - facts.plan.used_endpoints.keys())

    def _hear(self, event: AnyEvent) -> None:
        self.seen[type(event).__name__] += 1
        match event:
            case Progress() | Attempt() | Fallback():
                return
            case Token() | Reading():
                assert event.request in self.open_requests
            case Loaded():
                self._end_load()
            case Done() | Answered():
                self._end_request(event.request)
            case OutOfMemory() | Failed() | Crashed() | Cancelled():
                if event.request is not None:
                    self._end_request(event.request)
                elif event is self.lost_before:
                    self.lost_before = None
                elif self.loss_to_tell and not isinstance(event, Cancelled):
                    assert isinstance(event, OutOfMemory | Failed | Crashed)
                    self.loss_to_tell = False
                else:
                    self._end_load()

    def _end_load(self) -> None:
        # The load that is being ordered is counted when the machine has taken it.
        assert self.open_loads > 0, "each load has exactly one ending"
        self.open_loads -= 1

    def _end_request(self, number: int | None) -> None:
        assert number in self.open_requests, "each request has exactly one ending"
        self.open_requests.remove(number)
        self.ended_requests.append(number)

    def _check(self) -> None:
        """What holds after every input."""
        state, snapshot = self.state, snapshot_of(self.state)
        started = {run.id for run in state.requests}
        self.open_requests |= started - set(self.ended_requests)
        assert started == self.open_requests, "nothing lost, nothing twice"
        runs = state.load is not None and not state.load.of_answer
        assert runs + (state.waiting is not None) == self.open_loads
        assert set(self.children) == ({state.child.id} if state.child is not None else set())
        assert self.timers == ({state.stop_timer} if state.stop_timer is not None else set())
        assert (snapshot.pending is not None) == bool(self.open_loads)
        assert state.waiting is None or (snapshot.pending is not None and snapshot.pending.waits)
        if state.load is not None and state.load.ticket is not None:
            assert state.load.ticket in self.works
        if state.loss is not None:
            assert state.loss.ticket in self.works
        if snapshot.phase is Phase.READY:
            assert snapshot.loaded is not None
        self.seen[snapshot.phase.name] += 1
        if state.load is not None:
            self.seen[state.load.step.name] += 1


LOADED = LoadedModel(
    parts=(),
    n_ctx=512,
    n_ctx_seq=256,
    slots=2,
    n_vocab=259,
    flash_attention=True,
    chat_template=True,
    layer_devices=("CPU", "CPU"),
    kv_devices=((0, "CPU"),),
)


def generated(number: int) -> Generated:
    return Generated(
        request=number,
        prompt_tokens=4,
        cached_tokens=0,
        evaluated_tokens=4,
        generated_tokens=1,
        prompt_seconds=0.1,
        generation_seconds=0.1,
        context_used=5,
        stop_reason="end_of_text",
    )


def refused_memory(request: int | None) -> AllocationFailure:
    return AllocationFailure(
        stage="context",
        device="CPU",
        buffer_type="CPU",
        requested_bytes=5,
        free_bytes=1,
        parts=(),
        text="no",
        request=request,
    )


def _messages(number: int) -> tuple[AnyMessage, ...]:
    """Return what a child may say, about the request with this number where it is about one."""
    return (
        Hello(protocol=2, engine="fake", pid=1),
        *(StageProgress(stage=stage, fraction=0.5) for stage in _STAGES),
        *(LOADED, LOADED, LOADED, LOADED),
        refused_memory(None),
        refused_memory(None),
        refused_memory(number),
        Failure(kind="internal", message="No."),
        Failure(kind="internal", message="No.", request=number),
        Failure(kind="cancelled", message="No.", request=number),
        Stopped(stage="read"),
        ReadingMessage(request=number, read_tokens=1, prompt_tokens=2),
        Piece(request=number, text="a"),
        generated(number),
        Tokenised(request=number, tokens=(1,), pieces=("a",)),
        DeviceMemoryReadings(readings=()),
    )
