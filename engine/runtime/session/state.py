"""The state of one open model: one frozen value, replaced as a whole by each input; and `Turn`, the change that one
input makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from engine.planning.fit.proposal import Proposal
from engine.planning.fit.step_back import Tried
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.process.outcome import ProcessOutcome
from engine.runtime.protocol.messages import AnyModelRequest, AnyRequest, Load, StageProgress
from engine.runtime.session import effects
from engine.runtime.session.effects import Effect
from engine.runtime.session.events import STAGE_WORDS, AnyEvent, LoadEnding, OutOfMemory, Progress, Stage
from engine.runtime.session.load_order import LoadAttempt, LoadOrder

STOP_TIMEOUT_S = 2.0
"""Time from the request to stop until a child that does not stop has been killed."""
_STAGES: tuple[Stage, ...] = tuple(STAGE_WORDS)


@dataclass(frozen=True, slots=True)
class StageMark:
    """The progress of a load. `fraction`: 0 to 1 of the stage, None if it is not known."""

    stage: Stage = "header"
    fraction: float | None = None

    def after(self, message: StageProgress) -> StageMark | None:
        """Return the progress after `message`; None if the message is about an earlier stage."""
        if _STAGES.index(message.stage) < _STAGES.index(self.stage):
            return None
        before = self.fraction if message.stage == self.stage else None
        if message.fraction is None:
            return StageMark(message.stage, before)
        fraction = min(1.0, max(0.0, message.fraction))
        return StageMark(message.stage, fraction if before is None else max(fraction, before))

    def progress(self, device: str | None = None) -> Progress:
        """Return it as an event."""
        return Progress(stage=self.stage, fraction=self.fraction, device=device)


@dataclass(frozen=True, slots=True)
class LoadedInfo:
    """The loaded model. `order`: with the plan that was loaded in the end.

    `n_ctx`: tokens of all `slots` together. `n_ctx_seq`: tokens that one request may use. `context`: the settings that
    were used. `flash_attention`: None if the engine did not report it. `measured`, `forecast`: a row for each device.
    """

    order: LoadOrder
    n_ctx: int
    n_ctx_seq: int
    slots: int
    n_vocab: int
    chat_template: bool
    flash_attention: bool | None
    layer_devices: tuple[str, ...]
    kv_devices: tuple[tuple[int, str], ...]
    context: ContextSettings
    measured: tuple[DeviceRow, ...]
    forecast: tuple[DeviceRow, ...]


@dataclass(frozen=True, slots=True)
class Child:
    """The child process, from its start until its end was reported. There is at most one.

    `greeted`: it has sent its hello. `ending`: it was asked to end. `killed`: it is being killed because it did not
    stop in time; its later messages about requests are ignored.
    """

    id: int
    plan: Plan
    greeted: bool = False
    ending: bool = False
    killed: bool = False


class Step(Enum):
    """The step of a load; each docstring below says what the step waits for."""

    PREPARING = auto()
    """for the request that the child gets, or the rule that the layout breaks"""
    FORECASTING = auto()
    """for the engine's own forecast of the layout, where others may be tried"""
    CHOOSING = auto()
    """for another layout, after one that did not fit"""
    GREETING = auto()
    """for the workers of the layout to answer"""
    REPLACING = auto()
    """for the end of the child that holds what was loaded before"""
    LOADING = auto()
    """for its own child"""
    ENDING = auto()
    """for the end of its own child, whose last word is known"""
    DIAGNOSING = auto()
    """for the name of the device that is to blame for the loss of its child"""
    EXPLAINING = auto()
    """for proposals, after it ran out of memory"""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """The load that runs. `asked`: the order. `plan`: the plan that is being tried for it.

    `base`: the plan of the order with tables of its own, which no other thread uses; None until it is prepared.

    `ticket` is that of the work that it waits for, None where it waits for a child. `is_real`: the layout is to be
    loaded, whatever is forecast for it. `unchecked` are workers that what was loaded before still holds. `ending` is
    kept until the child has gone or the proposals are there.
    """

    asked: LoadOrder
    plan: Plan
    base: Plan | None = None
    step: Step = Step.PREPARING
    ticket: int | None = None
    mark: StageMark = field(default_factory=StageMark)
    request: Load | None = None
    is_real: bool = False
    unchecked: tuple[str, ...] = ()
    tenths: int = 0
    latest: Tried | None = None
    tried: tuple[Tried, ...] = ()
    attempts: tuple[LoadAttempt, ...] = ()
    ending: LoadEnding | None = None
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of the last load."""

    attempts: tuple[LoadAttempt, ...]
    ending: LoadEnding
    proposals: tuple[Proposal, ...]


class RequestState(Enum):
    """ASKED: sent to the child. READING: the prompt is processed. ANSWERING: text arrives. STOPPING: asked to stop."""

    ASKED = auto()
    READING = auto()
    ANSWERING = auto()
    STOPPING = auto()


@dataclass(frozen=True, slots=True)
class RequestRun:
    """A request that is under way."""

    request: AnyModelRequest
    state: RequestState = RequestState.ASKED

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def stopping(self) -> bool:
        return self.state is RequestState.STOPPING


@dataclass(frozen=True, slots=True)
class Loss:
    """A child that ended or stalled while it used RPC workers: each of them is asked whether it is still there.

    `stage`: of the load; None if the child was answering or idle.
    """

    ticket: int
    outcome: ProcessOutcome
    stage: Stage | None
    plan: Plan


@dataclass(frozen=True, slots=True)
class State:
    """One open model. `numbers` counts children, tickets and timers, `asked` counts requests.

    `waiting`: a load that was requested while something runs; it begins after that has ended.
    """

    stop_timeout_s: float = STOP_TIMEOUT_S
    numbers: int = 0
    asked: int = 0
    child: Child | None = None
    loaded: LoadedInfo | None = None
    context_used: int | None = None
    load: LoadRun | None = None
    waiting: LoadOrder | None = None
    requests: tuple[RequestRun, ...] = ()
    stop_timer: int | None = None
    loss: Loss | None = None
    last: LoadResult | None = None
    has_failed: bool = False
    unload_wanted: bool = False
    closing: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether no load and no request is under way; a model may be loaded."""
        return self.load is None and not self.requests and self.loss is None

    @property
    def is_over(self) -> bool:
        """Whether the session is closed and its child has ended."""
        return self.closing and self.is_idle and self.child is None and self.waiting is None


def out_of_memory_ending(load: LoadRun) -> OutOfMemory:
    """Return the ending of a load that is being explained."""
    assert isinstance(load.ending, OutOfMemory)
    return load.ending


class Turn:
    """State and effects during one call of `advance`, which returns both."""

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
        """The load that runs; there must be one."""
        assert self.state.load is not None
        return self.state.load

    @property
    def child(self) -> Child:
        """The child; there must be one."""
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
        """Begin or end watching whether the child stalls."""
        if self.state.child is not None and not self.state.child.ending:
            self.do(effects.Watch(self.state.child.id, active))

    def stop_child(self) -> None:
        """Ask the child to end, unless it was asked before."""
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
