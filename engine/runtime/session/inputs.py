"""Inputs of the session's state machine: commands from the owner of the session, and reports of what has happened.

The reports come from `Driver`, which carries out the effects of the state machine.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from engine.devices.endpoint import Greeting
from engine.devices.telemetry.sample import MemoryHolder
from engine.planning.fit.proposal import Proposal
from engine.planning.fit.step_back import NextLayout
from engine.planning.plan.plan import Plan
from engine.runtime.process.outcome import ProcessOutcome
from engine.runtime.protocol import messages, requests
from engine.runtime.session.events import Failed
from engine.runtime.session.load_spec import LoadSpec

Greetings = Mapping[str, Greeting]
"""Results of the check whether RPC workers answer, by endpoint (`host:port`)."""

# ------------------------------------------------------------------ commands


class Load(Struct, frozen=True):
    """Command: stop the running load or requests, then load `spec`. Refused after `Close`."""

    spec: LoadSpec


class SubmitRequest(Struct, frozen=True):
    """Command: send a request to the loaded model; refused if no model is ready. The state machine assigns its id."""

    request: requests.AnyModelRequest


class StopRequest(Struct, frozen=True):
    """Command: stop the request with this number."""

    id: int


class StopAll(Struct, frozen=True):
    """Command: stop the running load, the waiting load, and every request."""


class Unload(Struct, frozen=True):
    """Command: stop everything that runs, then end the child, which frees the model."""


class Close(Struct, frozen=True):
    """Command: stop everything, end the child, and refuse later commands."""


class QueryMemory(Struct, frozen=True):
    """Command: request the current free memory of the loaded model's devices from the child."""


Command = Load | SubmitRequest | StopRequest | StopAll | Unload | Close | QueryMemory

# ------------------------------------------------------------------ results of work, by its ticket


class Prepared(Struct, frozen=True):
    """Result of `Prepare`: the plan breaks no rule and can be loaded.

    `plan`: the plan with a computed forecast. Its tables for estimates are not shared with other plans, because only
    one thread may use them (`Plan.with_own_tables`).
    `request`: the request for the child.
    """

    ticket: int
    plan: Plan
    request: requests.Load


class Refused(Struct, frozen=True):
    """Result of `Prepare`: the plan cannot be loaded. `ending`: final event of the load, with the reason."""

    ticket: int
    ending: Failed


class Forecasted(Struct, frozen=True):
    """Result of `Forecast`.

    `plan`: the plan with the memory that a probe (a load without allocation) reported, or with an estimate if there was
    no probe.
    `fits`: whether the forecast fits on every device.
    """

    ticket: int
    plan: Plan
    fits: bool


class Chosen(Struct, frozen=True):
    """Result of `Choose`. `found`: the layout to try next; None if there is no other."""

    ticket: int
    found: NextLayout | None


class Greeted(Struct, frozen=True):
    """Result of `Greet`: whether each RPC worker answered."""

    ticket: int
    greetings: Greetings


class Explained(Struct, frozen=True):
    """Result of `Explain`, after a load ran out of memory on a device.

    `proposals`: changes after which the load should fit.
    `holders`: processes that hold memory of that device.
    """

    ticket: int
    proposals: tuple[Proposal, ...]
    holders: tuple[MemoryHolder, ...]


class WorkFailed(Struct, frozen=True):
    """Input: the work with this ticket (number) raised an unexpected exception, which is in the log."""

    ticket: int


# ------------------------------------------------------------------ children, timers, bugs


class ChildMessage(Struct, frozen=True):
    """Input: a message of a child."""

    child: int
    message: messages.AnyMessage


class ChildEnded(Struct, frozen=True):
    """Input: a child has ended. Reported once for each child that was started, after all its messages."""

    child: int
    outcome: ProcessOutcome


class TimerExpired(Struct, frozen=True):
    """Input: a timer has expired. The state machine ignores the input if it has cancelled the timer in the meantime."""

    timer: int


class Bug(Struct, frozen=True):
    """Input: code of the state machine or of an effect raised an unexpected exception, which is in the log.

    The state machine then ends the running load or requests.
    """


Work = Prepared | Refused | Forecasted | Chosen | Greeted | Explained | WorkFailed
Input = Command | Work | ChildMessage | ChildEnded | TimerExpired | Bug
