"""What goes into the machine: what somebody wants, and what the driver reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.devices.endpoint import Greeting
from engine.devices.holder import MemoryHolder
from engine.fit.proposal import Proposal
from engine.fit.step_back import NextLayout
from engine.plan.plan import Plan
from engine.process.outcome import ProcessOutcome
from engine.protocol import messages as protocol
from engine.session.events import Failed
from engine.session.load_order import LoadOrder

Greetings = Mapping[str, Greeting]
"""What workers answered to our hello, by endpoint."""

# ------------------------------------------------------------------ commands


@dataclass(frozen=True, slots=True)
class Load:
    """Load what `order` says, after what runs has been stopped; refused when closed."""

    order: LoadOrder


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the loaded model; refused when none is ready. The machine gives the request its id."""

    request: protocol.AnyModelRequest


@dataclass(frozen=True, slots=True)
class StopRequest:
    """End one request."""

    id: int


@dataclass(frozen=True, slots=True)
class StopAll:
    """End the load that runs, the one that waits, and every request."""


@dataclass(frozen=True, slots=True)
class Unload:
    """End all that runs, then free what is loaded."""


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
    """The plan can be loaded, with this request. It is given back with tables of its own, and its forecast made."""

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
    """The plan with what each device will hold, as well as that can be told."""

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
    """What the workers said."""

    ticket: int
    greetings: Greetings


@dataclass(frozen=True, slots=True)
class Explained:
    """What to change, and who holds the memory."""

    ticket: int
    proposals: tuple[Proposal, ...]
    holders: tuple[MemoryHolder, ...]


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """An error of ours in the work with this ticket; the log has it."""

    ticket: int


# ------------------------------------------------------------------ children, timers, bugs


@dataclass(frozen=True, slots=True)
class ChildSaid:
    """A message of a child."""

    child: int
    message: protocol.AnyMessage


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """The end of a child, told once for each that was started, after its messages."""

    child: int
    outcome: ProcessOutcome


@dataclass(frozen=True, slots=True)
class TimerRang:
    """The time of a timer is over; it may have been cancelled in the last moment."""

    timer: int


@dataclass(frozen=True, slots=True)
class Bug:
    """An error of ours, anywhere; the log has it. What runs gets its ending."""


Work = Prepared | Refused | Forecasted | Chosen | Greeted | Explained | WorkFailed
Input = Command | Work | ChildSaid | ChildEnded | TimerRang | Bug
