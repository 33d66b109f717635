"""Effects: what the machine has the driver do, in this order.

Work runs in threads of its own and reports once, under its ticket, even if it was abandoned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.planning.fit.step_back import Tried
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, Constraints
from engine.planning.plan.plan import Plan
from engine.runtime.protocol import messages as protocol
from engine.runtime.session.events import AnyEvent, OutOfMemory
from engine.runtime.session.load_order import LoadOrder

# ------------------------------------------------------------------ children


@dataclass(frozen=True, slots=True)
class StartChild:
    """Start a child for `plan` and send it `request`. It is watched for silence until `Watch` says otherwise."""

    child: int
    plan: Plan
    request: protocol.Load


@dataclass(frozen=True, slots=True)
class Send:
    child: int
    request: protocol.AnyRequest


@dataclass(frozen=True, slots=True)
class Watch:
    """Whether a silent child counts as stalled."""

    child: int
    active: bool


@dataclass(frozen=True, slots=True)
class StopChild:
    """Ask it to end; if that takes too long, terminate and then kill it."""

    child: int


@dataclass(frozen=True, slots=True)
class KillChild:
    """End it without asking."""

    child: int


# ------------------------------------------------------------------ work


@dataclass(frozen=True, slots=True)
class Prepare:
    """Check the plan and make the child's request from it; reports `Prepared` or `Refused`."""

    ticket: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast the memory of each device; reports `Forecasted`. `ask_engine`: by a probe, if possible."""

    ticket: int
    plan: Plan
    ask_engine: bool


@dataclass(frozen=True, slots=True)
class Choose:
    """Choose the next layout after those that were tried for `asked`; reports `Chosen`."""

    ticket: int
    asked: LoadOrder
    tried: tuple[Tried, ...]


@dataclass(frozen=True, slots=True)
class Greet:
    """Greet RPC workers, some of them through tunnels (`routes`); reports `Greeted`."""

    ticket: int
    endpoints: tuple[str, ...]
    routes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Explain:
    """Search for proposals and probe them; reports `Explained`."""

    ticket: int
    plan: Plan
    tried: tuple[Tried, ...]
    ending: OutOfMemory
    constraints: Constraints = NO_CONSTRAINTS


@dataclass(frozen=True, slots=True)
class Abandon:
    """Cancel work: its result is not needed any more, or only as far as it is known."""

    ticket: int


# ------------------------------------------------------------------ the rest


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Start the timer for a child that was asked to stop."""

    timer: int


@dataclass(frozen=True, slots=True)
class CancelTimer:
    timer: int


@dataclass(frozen=True, slots=True)
class Tell:
    event: AnyEvent


@dataclass(frozen=True, slots=True)
class TellMemory:
    readings: protocol.DeviceMemoryReadings


Work = Prepare | Forecast | Choose | Greet | Explain
Effect = StartChild | Send | Watch | StopChild | KillChild | Work | Abandon | SetTimer | CancelTimer | Tell | TellMemory
