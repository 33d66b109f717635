"""Effects: actions that the state machine returns, and that the driver carries out in their order.

`Work` is the union of the effects that take time. Each runs in a thread of its own and reports one result with its
ticket, even if it was cancelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.devices.device import ComputingNeed
from engine.planning.fit.step_back import Tried
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, Constraints
from engine.planning.plan.plan import Plan
from engine.runtime.protocol import messages, requests
from engine.runtime.session.events import AnyEvent, OutOfMemory
from engine.runtime.session.load_order import LoadOrder

# ------------------------------------------------------------------ children


@dataclass(frozen=True, slots=True)
class StartChild:
    """Start a child for `plan` and send it `request`. Its stall timeout runs until a `Watch` turns it off.

    `child`: number of the child in later effects and inputs.
    `without_tensor_api`: whether the child must not use Metal's tensor API.
    `stall_limit_s`: stall timeout in seconds; None for that of the driver.
    """

    child: int
    plan: Plan
    request: requests.Load
    without_tensor_api: bool = False
    stall_limit_s: int | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """Send a request to a child."""

    child: int
    request: requests.AnyRequest


@dataclass(frozen=True, slots=True)
class Watch:
    """Turn the stall timeout of a child on or off. It is off while the child has nothing to do."""

    child: int
    active: bool


@dataclass(frozen=True, slots=True)
class StopChild:
    """Ask a child to end. If it takes too long, it is terminated, then killed."""

    child: int


@dataclass(frozen=True, slots=True)
class KillChild:
    """Kill a child without asking it to end."""

    child: int


# ------------------------------------------------------------------ work


@dataclass(frozen=True, slots=True)
class Prepare:
    """Check the plan and make the child's request from it; reports `Prepared` or `Refused`."""

    ticket: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast the memory of each device; reports `Forecasted`.

    `ask_engine`: True for a probe by llama.cpp; False for the arithmetic alone.
    """

    ticket: int
    plan: Plan
    ask_engine: bool


@dataclass(frozen=True, slots=True)
class Choose:
    """Choose the next layout for the order `asked`, after those in `tried`; reports `Chosen`."""

    ticket: int
    asked: LoadOrder
    tried: tuple[Tried, ...]


@dataclass(frozen=True, slots=True)
class Greet:
    """Greet RPC workers; reports `Greeted`.

    `routes`: local address of the tunnel for each endpoint that is reached through one.
    """

    ticket: int
    endpoints: tuple[str, ...]
    routes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Explain:
    """Search for proposals after a load that ran out of memory, and probe them; reports `Explained`.

    `plan`: the plan that was ordered.
    `tried`: the layouts that failed.
    `ending`: the failure of the last of them.
    `constraints`: limits of the search.
    """

    ticket: int
    plan: Plan
    tried: tuple[Tried, ...]
    ending: OutOfMemory
    constraints: Constraints = NO_CONSTRAINTS


@dataclass(frozen=True, slots=True)
class CancelWork:
    """Cancel the work with this ticket. It still reports a result, which may be incomplete."""

    ticket: int


# ------------------------------------------------------------------ the rest


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Start the stop timer; reports `TimerExpired`.

    `timeout_s`: seconds from the stop until the child must be dead. The timer expires earlier by the time of the kill.
    """

    timer: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """Cancel a timer. It may already have expired."""

    timer: int


@dataclass(frozen=True, slots=True)
class Report:
    """Report an event to the receiver, or to the stream of its request."""

    event: AnyEvent


@dataclass(frozen=True, slots=True)
class ReportMemory:
    """Report readings of device memory to the receiver."""

    readings: messages.DeviceMemoryReadings


@dataclass(frozen=True, slots=True)
class ReportNeed:
    """Report to the receiver how much memory computations need on a device beyond the forecast."""

    need: ComputingNeed


Work = Prepare | Forecast | Choose | Greet | Explain
Effect = (
    StartChild
    | Send
    | Watch
    | StopChild
    | KillChild
    | Work
    | CancelWork
    | SetTimer
    | CancelTimer
    | Report
    | ReportMemory
    | ReportNeed
)
