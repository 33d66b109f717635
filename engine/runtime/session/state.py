"""The private state of one open model: an immutable value.

Each input (a command or a report to the state machine) replaces the state as a whole. `Transition` collects the new
state and the effects (actions for the driver) while one input is handled.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from msgspec import Struct, field

from engine.base.values import replace
from engine.planning.fit.proposal import Proposal
from engine.planning.fit.step_back import Tried
from engine.planning.plan.edit import Edit
from engine.planning.plan.placement_check import DeviceDifference
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.process.outcome import ProcessOutcome
from engine.runtime.protocol.messages import StageProgress
from engine.runtime.protocol.requests import AnyModelRequest, AnyRequest, Load
from engine.runtime.session import effects
from engine.runtime.session.effects import Effect
from engine.runtime.session.events import (
    STAGE_TEXTS,
    AnyEvent,
    Crashed,
    Failed,
    LoadEnding,
    OutOfMemory,
    Progress,
    Stage,
)
from engine.runtime.session.load_spec import LoadAttempt, LoadSpec

STOP_TIMEOUT_S = 2.0
"""Longest time in seconds in which a child that is to end may stop its requests or its load before it is killed."""
READING_PATIENCE = 15
"""Factor that lengthens `STOP_TIMEOUT_S` while a prompt is tokenised, or computed by devices other than the CPU.

Only ggml's CPU backend calls the abort callback while it computes. Cards and RPC workers finish the batch first, which
takes seconds on a slow worker.
"""
_STAGES: tuple[Stage, ...] = tuple(STAGE_TEXTS)


class LoadProgress(Struct, frozen=True):
    """Progress of a load.

    `fraction`: completed fraction of the stage, 0 to 1; None if unknown.
    `draft`: whether the draft model is being loaded. It goes through the same stages after the model.
    """

    stage: Stage = "header"
    fraction: float | None = None
    draft: bool = False

    def after(self, message: StageProgress) -> LoadProgress | None:
        """Return the progress after a message of the child; None if the message is about an earlier stage."""
        reached, now = (self.draft, self.stage), (message.draft, message.stage)
        if (now[0], _STAGES.index(now[1])) < (reached[0], _STAGES.index(reached[1])):
            return None
        # A message without a fraction keeps the last one of the same stage; a fraction never falls.
        before = self.fraction if now == reached else None
        if message.fraction is None:
            return LoadProgress(message.stage, before, message.draft)
        fraction = min(1.0, max(0.0, message.fraction))
        return LoadProgress(message.stage, fraction if before is None else max(fraction, before), message.draft)

    def event(self, device: str | None = None) -> Progress:
        """Return the progress as an event. `device`: id of the device that is being filled; None if unknown."""
        return Progress(stage=self.stage, fraction=self.fraction, device=device)


class LoadedInfo(Struct, frozen=True):
    """The loaded model.

    `spec`: the request for the load, with the plan that was loaded. After retries this can be another plan than the
    requested one.
    `n_ctx`: context of all slots together in tokens, as rounded by llama.cpp.
    `n_ctx_seq`: context of one request in tokens.
    `slots`: number of requests that are computed at the same time.
    `chat_template`: whether the model's file has a chat template.
    `flash_attention`: whether flash attention is used; None if llama.cpp did not report it.
    `layer_devices`: device id of each layer, the output layer last.
    `kv_devices`: index and device id of each layer with a KV cache.
    `context`: context settings that were used.
    `measured`, `forecast`: memory on each device, after the load and as forecast before it.
    `elsewhere`: layers and caches that are on another device than the layout asks for.
    """

    spec: LoadSpec
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
    elsewhere: tuple[DeviceDifference, ...] = ()


class Child(Struct, frozen=True):
    """The child process, from its start until its end was reported. A session has at most one.

    `id`: number that identifies it in the effects and inputs of the state machine.
    `plan`: the plan that it loads or has loaded.
    `greeted`: whether it has sent its first message (`Hello`).
    `ending`: whether it was asked to end.
    `killed`: whether it is being killed because its requests did not stop in time. Its later messages are ignored.
    """

    id: int
    plan: Plan
    greeted: bool = False
    ending: bool = False
    killed: bool = False


class Step(Enum):
    """Step of a load. Each step is named after the work that the load waits for; `loads.py` has their order."""

    PREPARING = auto()
    """Waits for the check of the plan, and for the request to the child that is made from it."""
    FORECASTING = auto()
    """Waits for the forecast of the layout. Only loads that may try other layouts have this step."""
    CHOOSING = auto()
    """Waits for the choice of another layout, after one that did not fit."""
    GREETING = auto()
    """Waits for the RPC workers of the layout to answer."""
    REPLACING = auto()
    """Waits for the end of the child that holds the model loaded before."""
    LOADING = auto()
    """Waits for the child to load the model."""
    ENDING = auto()
    """Waits for the end of the child that loads; the ending of the load is known."""
    DIAGNOSING = auto()
    """Waits for a check which RPC workers still answer, because the loss of one may have ended the child."""
    EXPLAINING = auto()
    """Waits for proposals (changes after which the model should fit), after the load ran out of memory."""


class LoadRun(Struct, frozen=True):
    """The load that is under way, as the session's state machine stores it.

    `asked`: what to load, and whether other layouts may be tried.
    `plan`: the plan that is being tried.
    `base`: the requested plan, with caches that no other thread uses; None until the plan is prepared.
    `step`: the present step, which names what the load waits for.
    `ticket`: number of the background work for which the load waits; None if it waits for a child process.
    `request`: load request for the child process; None until the plan is prepared.
    `is_real`: whether the load of `plan` has begun; False while its memory is only forecast.
    `unchecked`: RPC endpoints that the previous child process used. They are contacted after that process has ended.
    `backoff_tenths`: how many tenths of its capacity stay unused on each device with a failed allocation
    (`planning.fit.step_back`).
    `latest`: the layout that did not fit, while another one is being chosen.
    `tried`: all layouts that did not fit.
    `attempts`: all attempts so far, with the current one; empty if no other layouts may be tried.
    `ending`: final event of the load, to be reported when the child has ended or the proposals are found.
    `cancelled`: whether the load was cancelled and is ending.
    `of_answer`: whether this is only a search for proposals, after an answer ran out of memory. Nothing is loaded then.
    """

    asked: LoadSpec
    plan: Plan
    base: Plan | None = None
    step: Step = Step.PREPARING
    ticket: int | None = None
    progress: LoadProgress = field(default_factory=LoadProgress)
    request: Load | None = None
    is_real: bool = False
    unchecked: tuple[str, ...] = ()
    backoff_tenths: int = 0
    latest: Tried | None = None
    tried: tuple[Tried, ...] = ()
    attempts: tuple[LoadAttempt, ...] = ()
    ending: LoadEnding | None = None
    cancelled: bool = False
    of_answer: bool = False


class LoadResult(Struct, frozen=True):
    """Result of the last load that has ended: its attempts, its final event, and proposed changes for another load."""

    attempts: tuple[LoadAttempt, ...]
    ending: LoadEnding
    proposals: tuple[Proposal, ...]


class RequestState(Enum):
    """State of a request to the loaded model.

    ASKED: sent to the child, which may be tokenising it. READING: prompt processing. ANSWERING: text arrives.
    STOPPING: asked to stop.
    """

    ASKED = auto()
    READING = auto()
    ANSWERING = auto()
    STOPPING = auto()


class RequestRun(Struct, frozen=True):
    """A request to the loaded model that has not ended. Its events carry the number `request.id`."""

    request: AnyModelRequest
    state: RequestState = RequestState.ASKED
    ends_late: bool = False
    """Whether the request was stopped while its prompt was tokenised, or computed by cards or RPC workers, so that it
    ends late.
    """

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def stopping(self) -> bool:
        return self.state is RequestState.STOPPING

    def stopped(self, *, on_cpu: bool) -> RequestRun:
        """Return this request in the state STOPPING.

        `on_cpu`: whether the model is on the CPU alone. Only the CPU backend can interrupt a batch; otherwise a request
        that is stopped during its prompt may take longer to end (`ends_late`).
        """
        # Nothing interrupts the tokenizer either, which takes seconds for some MiB of text.
        ends_late = self.state is RequestState.ASKED or (not on_cpu and self.state is RequestState.READING)
        return replace(self, state=RequestState.STOPPING, ends_late=self.ends_late or ends_late)


class Loss(Struct, frozen=True):
    """A child that ended or stalled while it used RPC workers. A running check finds the workers that still answer.

    `ticket`: number of the effect that checks the workers; its result has the same number.
    `outcome`: how the child ended.
    `stage`: stage of the load; None if the child was answering or idle.
    `plan`: plan of the child.
    """

    ticket: int
    outcome: ProcessOutcome
    stage: Stage | None
    plan: Plan


class Exhausted(Struct, frozen=True):
    """A loaded layout on which a device ran out of memory in an answer.

    `edit`: layout and settings that were loaded.
    `tried`: the layout, and the allocation that the device refused.
    `ending`: the event that reported the lack of memory.
    """

    edit: Edit
    tried: Tried
    ending: OutOfMemory


class State(Struct, frozen=True):
    """State of one open model.

    `numbers`: the highest id so far; children, slow effects (tickets) and timers get their ids from one counter.
    `asked`: number of requests so far.
    `context_used`: number of tokens in the context at the end of the last answer.
    `waiting`: load that was requested while another load or a request was running; it begins when those have ended.
    `stop_timer`: id of the running stop timer; None if none runs.
    `loss`: a lost child, while the cause of its loss is searched for; else None.
    `lost`: event that reports the loss of the loaded model, if that happened while a new load was being prepared. It
    is sent when the new load is cancelled and no other load waits; if a load succeeds or fails, it is dropped.
    `exhausted`: the layout of the last model, if it ran out of memory in an answer. If the same layout is requested
    again and other layouts may be tried, the load begins with another layout.
    `last`: result of the last load.
    `has_failed`: whether the last load failed, or its child was lost.
    `unload_wanted`: whether the child must end as soon as no load and no request runs.
    `closing`: whether the session is closed, and so refuses commands.
    `without_tensor_api`: whether loads leave out Metal's tensor API, because an earlier load failed in it.
    """

    stop_timeout_s: float = STOP_TIMEOUT_S
    numbers: int = 0
    asked: int = 0
    child: Child | None = None
    loaded: LoadedInfo | None = None
    context_used: int | None = None
    load: LoadRun | None = None
    waiting: LoadSpec | None = None
    requests: tuple[RequestRun, ...] = ()
    stop_timer: int | None = None
    loss: Loss | None = None
    lost: Failed | Crashed | None = None
    exhausted: Exhausted | None = None
    last: LoadResult | None = None
    has_failed: bool = False
    unload_wanted: bool = False
    closing: bool = False
    without_tensor_api: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether neither a load nor a request is under way. A model may be loaded or not."""
        return self.load is None and not self.requests and self.loss is None

    @property
    def is_over(self) -> bool:
        """Whether the session is closed and its child has ended."""
        return self.closing and self.is_idle and self.child is None and self.waiting is None


def out_of_memory_ending(load: LoadRun) -> OutOfMemory:
    """Return the final event of `load`, which must be an `OutOfMemory`."""
    assert isinstance(load.ending, OutOfMemory)
    return load.ending


class Transition:
    """Collects the new state and the effects during one call of `advance`.

    The functions of `machine.py`, `loads.py` and `answers.py` change this object. Then `advance` returns its state and
    its effects.
    """

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
        """The running load. Use it only while a load runs."""
        assert self.state.load is not None
        return self.state.load

    @property
    def child(self) -> Child:
        """The session's child. Use it only while there is one."""
        assert self.state.child is not None
        return self.state.child

    def do(self, effect: Effect) -> None:
        self.effects.append(effect)

    def report(self, event: AnyEvent) -> None:
        self.do(effects.Report(event))

    def number(self) -> int:
        """Return an unused number for a child, a timer, or the ticket of an effect."""
        self.change(numbers=self.state.numbers + 1)
        return self.state.numbers

    def send(self, request: AnyRequest) -> None:
        self.do(effects.Send(self.child.id, request))

    def watch(self, active: bool) -> None:
        """Turn the stall limit of the child on or off; do nothing if there is no child or it is ending."""
        if self.state.child is not None and not self.state.child.ending:
            self.do(effects.Watch(self.state.child.id, active))

    def stop_child(self) -> None:
        """Ask the child to end, unless it was asked before."""
        if not self.child.ending:
            self.do(effects.StopChild(self.child.id))
            self.change_child(ending=True)

    def await_work(self, step: Step, work: Callable[[int], effects.Work]) -> None:
        """Add an effect that runs in another thread, and set the step of the load that waits for its result.

        `work`: makes the effect from a ticket, the number by which its result is recognised.
        """
        # A new ticket each time: the result of abandoned work has an old one, and is ignored.
        ticket = self.number()
        self.change_load(step=step, ticket=ticket)
        self.do(work(ticket))

    def take_answer(self, ticket: int) -> bool:
        """Record that the result for `ticket` has arrived, so that the load no longer waits for it.

        Return False if the load does not wait for this result.

        `ticket`: number of the effect that `await_work` added.
        """
        if self.state.load is None or self.state.load.ticket != ticket:
            return False
        self.change_load(ticket=None)
        return True
