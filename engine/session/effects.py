"""What comes out of the machine: what the driver is to do, in this order.

Work goes on beside the rest and reports once, under its ticket, also where it was abandoned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.fit.step_back import Tried
from engine.fit.strategies.constraints import NO_CONSTRAINTS, Constraints
from engine.plan.plan import Plan
from engine.protocol import messages as protocol
from engine.session.events import AnyEvent, OutOfMemory
from engine.session.load_order import LoadOrder

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
    """Whether a silence of the child means that it stands still."""

    child: int
    active: bool


@dataclass(frozen=True, slots=True)
class StopChild:
    """Ask it to end; terminate, then kill it where that takes too long."""

    child: int


@dataclass(frozen=True, slots=True)
class KillChild:
    """End it without asking."""

    child: int


# ------------------------------------------------------------------ work


@dataclass(frozen=True, slots=True)
class Prepare:
    """Check the plan and make the request of it: `Prepared` or `Refused`."""

    ticket: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Forecast:
    """Say what the devices will hold: `Forecasted`. `ask_engine`: by a probe, where that can be."""

    ticket: int
    plan: Plan
    ask_engine: bool


@dataclass(frozen=True, slots=True)
class Choose:
    """Choose the layout after all that were tried for `asked`: `Chosen`."""

    ticket: int
    asked: LoadOrder
    tried: tuple[Tried, ...]


@dataclass(frozen=True, slots=True)
class Greet:
    """Say hello to workers, to those behind a tunnel where `routes` says: `Greeted`."""

    ticket: int
    endpoints: tuple[str, ...]
    routes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Explain:
    """Find proposals and ask the engine about them: `Explained`."""

    ticket: int
    plan: Plan
    tried: tuple[Tried, ...]
    ending: OutOfMemory
    constraints: Constraints = NO_CONSTRAINTS


@dataclass(frozen=True, slots=True)
class Abandon:
    """Nobody needs the work any more, or only what is known so far."""

    ticket: int


# ------------------------------------------------------------------ the rest


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Ring after what a child may take to stop by itself."""

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
