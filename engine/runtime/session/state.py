"""The private state of one open model: a frozen value, which each input replaces as a whole.

`Transition` collects the new state and the effects while one input is handled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from engine.planning.fit.proposal import Proposal
from engine.planning.fit.step_back import Tried
from engine.planning.plan.edit import Edit
from engine.planning.plan.placement_check import PlaceDifference
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
"""Seconds from a stop until a child that does not obey has been killed."""
READING_PATIENCE = 15
"""Factor of that time while a prompt is read by devices other than the CPU. Only ggml's CPU backend looks at the abort
callback while it computes; cards and RPC workers finish the batch first, which takes seconds on a slow worker.
"""
_STAGES: tuple[Stage, ...] = tuple(STAGE_WORDS)


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of a load. `fraction`: done part of the stage, 0 to 1; None if unknown."""

    stage: Stage = "header"
    fraction: float | None = None

    def after(self, message: StageProgress) -> LoadProgress | None:
        """Return the progress after a message of the child; None if the message is about an earlier stage."""
        if _STAGES.index(message.stage) < _STAGES.index(self.stage):
            return None
        # A message without a fraction keeps the last one of the same stage; a fraction never falls.
        before = self.fraction if message.stage == self.stage else None
        if message.fraction is None:
            return LoadProgress(message.stage, before)
        fraction = min(1.0, max(0.0, message.fraction))
        return LoadProgress(message.stage, fraction if before is None else max(fraction, before))

    def event(self, device: str | None = None) -> Progress:
        """Return the progress as an event."""
        return Progress(stage=self.stage, fraction=self.fraction, device=device)


@dataclass(frozen=True, slots=True)
class LoadedInfo:
    """The loaded model.

    `order`: the order, with the plan that was loaded in the end.
    `n_ctx`: tokens of all slots together, as llama.cpp rounded them.
    `n_ctx_seq`: tokens that one request may use.
    `slots`: number of requests that are computed at the same time.
    `chat_template`: whether the model's file has a chat template.
    `flash_attention`: None if llama.cpp did not report it.
    `layer_devices`: device id of each layer, the output layer last.
    `kv_devices`: index and device id of each layer with a KV cache.
    `context`: context settings that were used.
    `measured`, `forecast`: memory, a row for each device.
    `elsewhere`: layers and caches that are on another device than the layout asks for.
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
    elsewhere: tuple[PlaceDifference, ...] = ()


@dataclass(frozen=True, slots=True)
class Child:
    """The child process, from its start until its end was reported. A session has at most one.

    `plan`: the plan that it loads or has loaded.
    `greeted`: it has sent its hello.
    `ending`: it was asked to end.
    `killed`: it is being killed because its requests did not stop in time. Its later messages are ignored.
    """

    id: int
    plan: Plan
    greeted: bool = False
    ending: bool = False
    killed: bool = False


class Step(Enum):
    """The step of a load; `loads.py` describes their order."""

    PREPARING = auto()
    """Waits for the request to the child, or for the rule that the layout breaks."""
    FORECASTING = auto()
    """Waits for llama.cpp's forecast of the layout. Only loads that may try other layouts have this step."""
    CHOOSING = auto()
    """Waits for another layout, after one that did not fit."""
    GREETING = auto()
    """Waits for the RPC workers of the layout to answer."""
    REPLACING = auto()
    """Waits for the end of the child that holds the model loaded before."""
    LOADING = auto()
    """Waits for the child that loads."""
    ENDING = auto()
    """Waits for the end of the child that loads; the ending of the load is known."""
    DIAGNOSING = auto()
    """Waits for the RPC workers to answer, one of which may have caused the loss of the child."""
    EXPLAINING = auto()
    """Waits for proposals, after the load ran out of memory."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """The running load.

    `asked`: the order.
    `plan`: the plan that is being tried.
    `base`: plan of the order with tables of its own, which no other thread uses; None until it is prepared.
    `ticket`: ticket of the work that the load waits for; None if it waits for a child.
    `request`: request for the child; None until the plan is prepared.
    `is_real`: the layout is going to be loaded, whether or not its forecast fits.
    `unchecked`: endpoints that are greeted after the old child has ended, because it holds them.
    `tenths`: back-off with which the layout was planned, in tenths; see `engine.planning.fit.step_back`.
    `latest`: the layout that did not fit, while another one is being chosen.
    `tried`: all layouts that did not fit.
    `ending`: result of the load, until the child has ended or the proposals are found.
    `cancelled`: the load was cancelled and is ending.
    `of_answer`: nothing is loaded; proposals are looked for, because memory ran out in an answer.
    """

    asked: LoadOrder
    plan: Plan
    base: Plan | None = None
    step: Step = Step.PREPARING
    ticket: int | None = None
    progress: LoadProgress = field(default_factory=LoadProgress)
    request: Load | None = None
    is_real: bool = False
    unchecked: tuple[str, ...] = ()
    tenths: int = 0
    latest: Tried | None = None
    tried: tuple[Tried, ...] = ()
    attempts: tuple[LoadAttempt, ...] = ()
    ending: LoadEnding | None = None
    cancelled: bool = False
    of_answer: bool = False


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of the last load."""

    attempts: tuple[LoadAttempt, ...]
    ending: LoadEnding
    proposals: tuple[Proposal, ...]


class RequestState(Enum):
    """ASKED: sent to the child. READING: prompt processing. ANSWERING: text arrives. STOPPING: asked to stop."""

    ASKED = auto()
    READING = auto()
    ANSWERING = auto()
    STOPPING = auto()


@dataclass(frozen=True, slots=True)
class RequestRun:
    """A request to the loaded model that has not ended."""

    request: AnyModelRequest
    state: RequestState = RequestState.ASKED
    ends_late: bool = False
    """Whether cards or workers were reading its prompt, or were going to, when it was stopped."""

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def stopping(self) -> bool:
        return self.state is RequestState.STOPPING

    def stopped(self, *, on_cpu: bool) -> RequestRun:
        """Return the request after it was told to stop. `on_cpu`: whether the model is on the CPU alone."""
        ends_late = not on_cpu and self.state in (RequestState.ASKED, RequestState.READING)
        return replace(self, state=RequestState.STOPPING, ends_late=self.ends_late or ends_late)


@dataclass(frozen=True, slots=True)
class Loss:
    """A child that ended or stalled while it used RPC workers, each of which is being greeted to find the lost one.

    `ticket`: ticket of the greetings.
    `stage`: stage of the load; None if the child was answering or idle.
    """

    ticket: int
    outcome: ProcessOutcome
    stage: Stage | None
    plan: Plan


@dataclass(frozen=True, slots=True)
class Exhausted:
    """A loaded layout on which a device ran out of memory in an answer. `edit`: what was loaded."""

    edit: Edit
    tried: Tried
    ending: OutOfMemory


@dataclass(frozen=True, slots=True)
class State:
    """State of one open model.

    `numbers`: last number given to a child, ticket or timer.
    `asked`: number of requests so far.
    `context_used`: tokens in the context at the end of the last answer.
    `waiting`: load that was ordered while something runs; it begins after that has ended.
    `stop_timer`: number of the running stop timer.
    `loss`: loss of the child whose cause is being looked for.
    `exhausted`: the last model, if it was lost for want of memory; a load of it that may try others steps back.
    `last`: result of the last load.
    `has_failed`: the last load failed, or its child was lost.
    `without_tensor_api`: a load failed in Metal's tensor API; this and later ones leave it out.
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
    exhausted: Exhausted | None = None
    last: LoadResult | None = None
    has_failed: bool = False
    unload_wanted: bool = False
    closing: bool = False
    without_tensor_api: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether no load and no request is under way. A model may be loaded or not."""
        return self.load is None and not self.requests and self.loss is None

    @property
    def is_over(self) -> bool:
        """Whether the session is closed and its child has ended."""
        return self.closing and self.is_idle and self.child is None and self.waiting is None


def out_of_memory_ending(load: LoadRun) -> OutOfMemory:
    """Return the ending of a load that ran out of memory; the load must have ended so."""
    assert isinstance(load.ending, OutOfMemory)
    return load.ending


class Transition:
    """The new state and the effects during one call of `advance`, which returns both."""

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

    def report(self, event: AnyEvent) -> None:
        self.do(effects.Report(event))

    def number(self) -> int:
        """Return an unused number for a child, ticket or timer."""
        self.change(numbers=self.state.numbers + 1)
        return self.state.numbers

    def send(self, request: AnyRequest) -> None:
        self.do(effects.Send(self.child.id, request))

    def watch(self, active: bool) -> None:
        """Turn the stall timeout of the child on or off."""
        if self.state.child is not None and not self.state.child.ending:
            self.do(effects.Watch(self.state.child.id, active))

    def stop_child(self) -> None:
        """Ask the child to end, unless it was asked before."""
        if not self.child.ending:
            self.do(effects.StopChild(self.child.id))
            self.change_child(ending=True)

    def await_work(self, step: Step, work: Callable[[int], effects.Work]) -> None:
        """Begin `step` of the load, which waits for work. `work`: makes the effect for a ticket."""
        # A new ticket each time: the result of abandoned work has an old one, and is ignored.
        ticket = self.number()
        self.change_load(step=step, ticket=ticket)
        self.do(work(ticket))

    def take_answer(self, ticket: int) -> bool:
        """Return whether the load waits for this ticket, and clear it."""
        if self.state.load is None or self.state.load.ticket != ticket:
            return False
        self.change_load(ticket=None)
        return True
