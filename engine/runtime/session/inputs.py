"""Inputs of the machine: commands, and reports of the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.devices.endpoint import Greeting
from engine.devices.holder import MemoryHolder
from engine.planning.fit.proposal import Proposal
from engine.planning.fit.step_back import NextLayout
from engine.planning.plan.plan import Plan
from engine.runtime.process.outcome import ProcessOutcome
from engine.runtime.protocol import messages as protocol
from engine.runtime.session.events import Failed
from engine.runtime.session.load_order import LoadOrder

Greetings = Mapping[str, Greeting]
"""What workers answered to our hello, by endpoint."""

# ------------------------------------------------------------------ commands


@dataclass(frozen=True, slots=True)
class Load:
    """Load `order` after stopping what runs; refused after `Close`."""

    order: LoadOrder


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a request to the loaded model; refused if none is ready. The machine gives the request its id."""

    request: protocol.AnyModelRequest


@dataclass(frozen=True, slots=True)
class StopRequest:
    """End one request."""

    id: int


@dataclass(frozen=True, slots=True)
class StopAll:
    """End the running load, the waiting load, and every request."""


@dataclass(frozen=True, slots=True)
class Unload:
    """End everything that runs, then free the loaded model."""


@dataclass(frozen=True, slots=True)
class Close:
    """End everything, for good."""


@dataclass(frozen=True, slots=True)
class QueryMemory:
    """Ask the child for the live memory of its devices."""


Command = Load | Ask | StopRequest | StopAll | Unload | Close | QueryMemory

# ------------------------------------------------------------------ what became of work (by its ticket)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The plan can be loaded, with this request. `plan` has tables of its own, and its forecast is computed."""

    ticket: int
    plan: Plan
    request: protocol.Load


@dataclass(frozen=True, slots=True)
class Refused:
    """The plan cannot be loaded."""

    ticket: int
    ending: Failed


@dataclass(frozen=True, slots=True)
class Forecasted:
    """The plan with the best forecast of each device's memory."""

    ticket: int
    plan: Plan
    fits: bool


@dataclass(frozen=True, slots=True)
class Chosen:
    """The layout to try next; None: there is no other."""

    ticket: int
    found: NextLayout | None


@dataclass(frozen=True, slots=True)
class Greeted:
    """The answers of the workers."""

    ticket: int
    greetings: Greetings


@dataclass(frozen=True, slots=True)
class Explained:
    """Proposals for another load, and the processes that hold the device's memory."""

    ticket: int
    proposals: tuple[Proposal, ...]
    holders: tuple[MemoryHolder, ...]


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """An internal error in the work with this ticket, which is in the log."""

    ticket: int


# ------------------------------------------------------------------ children, timers, bugs


@dataclass(frozen=True, slots=True)
class ChildSaid:
    """A message of a child."""

    child: int
    message: protocol.AnyMessage


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """The end of a child, reported once for each that was started, after all its messages."""

    child: int
    outcome: ProcessOutcome


@dataclass(frozen=True, slots=True)
class TimerRang:
    """A timer has expired; it may have been cancelled a moment ago."""

    timer: int


@dataclass(frozen=True, slots=True)
class Bug:
    """An internal error, which is in the log. Whatever runs gets its ending."""


Work = Prepared | Refused | Forecasted | Chosen | Greeted | Explained | WorkFailed
Input = Command | Work | ChildSaid | ChildEnded | TimerRang | Bug
