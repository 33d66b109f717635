"""Effects: actions that the state machine returns, and that the driver executes in their order.

`Work` is the union of the effects that take time. Each runs in its own thread and reports one result, even if it was
cancelled. The result carries the effect's ticket, a number by which the machine recognises it.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from engine.devices.device import ComputingNeed
from engine.planning.fit.step_back import Tried
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, Constraints
from engine.planning.plan.plan import Plan
from engine.runtime.protocol import messages, requests
from engine.runtime.session.events import AnyEvent, OutOfMemory
from engine.runtime.session.load_spec import LoadSpec

# ------------------------------------------------------------------ children


class StartChild(Struct, frozen=True):
    """Effect: start a child for `plan` and send it `request`.

    The stall limit (longest allowed silence of the child) applies until a `Watch` effect turns it off.

    `child`: number of the child in later effects and inputs.
    `without_tensor_api`: whether the child must not use Metal's tensor API.
    `stall_limit_s`: stall limit in seconds; None for the driver's default.
    """

    child: int
    plan: Plan
    request: requests.Load
    without_tensor_api: bool = False
    stall_limit_s: int | None = None


class Send(Struct, frozen=True):
    """Effect: the driver sends a request to a child."""

    child: int
    request: requests.AnyRequest


class Watch(Struct, frozen=True):
    """Effect: the driver turns a child's stall limit (longest allowed silence) on or off.

    It is off while the child has nothing to do.
    """

    child: int
    active: bool


class StopChild(Struct, frozen=True):
    """Effect: the driver asks a child to end. A child that takes too long is terminated, then killed."""

    child: int


class KillChild(Struct, frozen=True):
    """Effect: the driver ends a child by SIGTERM, then SIGKILL, without waiting until it ends by itself."""

    child: int


# ------------------------------------------------------------------ work


class Prepare(Struct, frozen=True):
    """Effect: check the plan and make the child's request from it; the result is `Prepared` or `Refused`."""

    ticket: int
    plan: Plan


class Forecast(Struct, frozen=True):
    """Effect: forecast the memory of each device; the result is `Forecasted`.

    `ask_engine`: True: a probe by llama.cpp. False: only our own computation.
    """

    ticket: int
    plan: Plan
    ask_engine: bool


class Choose(Struct, frozen=True):
    """Effect: choose the layout to try next; the result is `Chosen`.

    `asked`: the plan that was to be loaded, with the rules for other layouts if it does not fit (`LoadSpec`).
    `tried`: the layouts that did not fit.
    """

    ticket: int
    asked: LoadSpec
    tried: tuple[Tried, ...]


class Greet(Struct, frozen=True):
    """Effect: check whether RPC workers answer (greet them); the result is `Greeted`.

    `routes`: tunnels to paired machines: the local address of each tunnel, by the endpoint that it leads to.
    """

    ticket: int
    endpoints: tuple[str, ...]
    routes: Mapping[str, str]


class Explain(Struct, frozen=True):
    """Effect: after a load ran out of memory, search for changes after which it should fit (proposals).

    Each proposal is probed (loaded without memory). The result is `Explained`.

    `plan`: the requested plan.
    `tried`: the layouts that failed.
    `ending`: the failure of the last layout.
    `constraints`: pinned layers and devices that must not be used.
    """

    ticket: int
    plan: Plan
    tried: tuple[Tried, ...]
    ending: OutOfMemory
    constraints: Constraints = NO_CONSTRAINTS


class CancelWork(Struct, frozen=True):
    """Effect: cancel the slow effect with this ticket (number). It still reports a result, which may be incomplete."""

    ticket: int


# ------------------------------------------------------------------ the rest


class SetTimer(Struct, frozen=True):
    """Effect: start the stop timer, which reports `TimerExpired`.

    `timeout_s`: seconds from the stop request until the child must have ended. The timer expires earlier, to leave time
    for killing the child.
    """

    timer: int
    timeout_s: float


class CancelTimer(Struct, frozen=True):
    """Effect: cancel a timer. The timer may already have expired."""

    timer: int


class Report(Struct, frozen=True):
    """Effect: report an event to the receiver of the request that it belongs to, or else to that of the session."""

    event: AnyEvent


class ReportMemory(Struct, frozen=True):
    """Effect: report readings of device memory to the receiver of the session."""

    readings: messages.DeviceMemoryReadings


class ReportNeed(Struct, frozen=True):
    """Effect: report to the session's receiver how many bytes a device needs for computations beyond the forecast."""

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
