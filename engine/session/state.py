"""What the machine knows of one open model: one frozen value, replaced whole with each input."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from engine.fit.proposal import Proposal
from engine.fit.step_back import Tried
from engine.plan.plan import Plan
from engine.plan.report import DeviceRow
from engine.process.outcome import ProcessOutcome
from engine.protocol.messages import AnyModelRequest, Load
from engine.session.attempts import LoadAttempt
from engine.session.events import LoadEnding, OutOfMemory, Stage
from engine.session.load_order import LoadOrder
from engine.session.stages import StageMark
from engine.settings.context_settings import ContextSettings

STOP_TIMEOUT_S = 2.0
"""From asking for an end until the child has been killed, if that is what it takes."""


@dataclass(frozen=True, slots=True)
class LoadedInfo:
    """What is loaded: the order, with the plan that it was in the end, and what its child and its devices told.

    `context` is what was used; `flash_attention` None: the engine did not tell. `n_ctx` is what all `slots` hold
    together, `n_ctx_seq` what one request may take of it. `measured` and `forecast` have a row for each device.
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
    """The one child that has been started and whose end has not been told.

    `greeted`: it has said hello. `ending`: it was asked to end. `killed`: it is ended for not stopping in time, and
    whatever it still says about requests comes too late.
    """

    id: int
    plan: Plan
    greeted: bool = False
    ending: bool = False
    killed: bool = False


class Step(Enum):
    """Where a load is, and with that what it waits for."""

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
    """The load that runs. `asked` is what was asked for, `plan` what is being tried for it.

    `base` is the plan that was asked for, with tables that nobody else plans with; None until that is there.

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
    """What became of the last load."""

    attempts: tuple[LoadAttempt, ...]
    ending: LoadEnding
    proposals: tuple[Proposal, ...]


class RequestState(Enum):
    """ASKED: the child has it. READING: its prompt. ANSWERING: text comes. STOPPING: it was asked to stop."""

    ASKED = auto()
    READING = auto()
    ANSWERING = auto()
    STOPPING = auto()


@dataclass(frozen=True, slots=True)
class RequestRun:
    """A request that has begun and not ended."""

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
    """A child that went down, or stood still, over RPC: its workers are being asked which of them is gone.

    `stage` None: it was answering or idle.
    """

    ticket: int
    outcome: ProcessOutcome
    stage: Stage | None
    plan: Plan


@dataclass(frozen=True, slots=True)
class State:
    """One open model. `numbers` counts children, tickets and timers, `asked` the requests.

    A load that is asked for while something runs is in `waiting`, and nowhere else, until that has ended.
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
        """Whether nothing runs; a model may be loaded."""
        return self.load is None and not self.requests and self.loss is None

    @property
    def is_over(self) -> bool:
        """Whether it is closed and nothing is left of it."""
        return self.closing and self.is_idle and self.child is None and self.waiting is None


def out_of_memory_ending(load: LoadRun) -> OutOfMemory:
    """Return the ending of a load that is being explained."""
    assert isinstance(load.ending, OutOfMemory)
    return load.ending
