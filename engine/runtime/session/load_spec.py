"""`LoadSpec`: a plan to load, and its retry policy. `LoadAttempt`: a layout that the load tried."""

from __future__ import annotations

from msgspec import Struct

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.base.values import replace
from engine.planning.fit.step_back import Refusal
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, Constraints
from engine.planning.layout.layout import Layout
from engine.planning.plan.plan import Plan
from engine.runtime.session.events import STAGE_TEXTS, Cancelled, Loaded, LoadEnding, OutOfMemory, stage_words

DEFAULT_RETRIES = 10
"""Default of `RetryPolicy.retries` for loads that may try other layouts."""


class RetryPolicy(Struct, frozen=True):
    """Whether and how a load may try other layouts if its layout does not fit.

    `retries`: largest number of other layouts; 0 if none may be tried.
    `constraints`: pinned layers and excluded devices.
    """

    retries: int = 0
    constraints: Constraints = NO_CONSTRAINTS


class LoadSpec(Struct, frozen=True):
    """What a session is to load: a plan (model, layout, settings and devices).

    `retry`: whether other layouts may be tried if the plan's layout does not fit.
    `stall_limit_s`: seconds without progress after which the child is ended; None for the default.
    """

    plan: Plan
    retry: RetryPolicy = RetryPolicy()
    stall_limit_s: int | None = None

    def with_plan(self, plan: Plan) -> LoadSpec:
        """Return a copy with another plan."""
        return replace(self, plan=plan)

    def possible_endpoints(self) -> frozenset[str]:
        """Return the endpoints of all RPC workers that this load may use.

        The result has the endpoints of the layout. If other layouts may be tried, it also has the endpoints of all
        workers that serve no other loaded model.
        """
        used = self.plan.used_endpoints
        if not self.retry.retries:
            return frozenset(used)
        # A worker that serves another model of this program is busy, so that no other layout uses it.
        devices = self.plan.rig.devices
        idle = (device.endpoint for device in devices if device.endpoint is not None and not device.holdings)
        return frozenset((*used, *idle))


FIRST_REASON = tr("The requested layout.")


class LoadAttempt(Struct, frozen=True):
    """One layout that was tried.

    `number`: number of the attempt, from 1.
    `reason`: why this layout was tried, as a sentence.
    `outcome`: result as a sentence; empty while the layout is being tried.
    `loaded`: whether a load of it began; False if its forecast did not fit, so that no load began.
    """

    number: int
    layout: Layout
    reason: str
    outcome: str = ""
    loaded: bool = False


def refusal_of(event: OutOfMemory) -> Refusal:
    """Return the failed allocation that an event reports, as a `Refusal`."""
    # A device that is not among the rows has got nothing before.
    placed_bytes = next((row.need_bytes for row in event.allocated if row.id == event.device), 0)
    return Refusal(event.device, event.requested_bytes, event.free_bytes, placed_bytes)


def outcome_words(ending: LoadEnding) -> str:
    """Return the outcome of an attempt that ended with `ending`, as a sentence."""
    match ending:
        case Loaded():
            return tr("Loaded.")
        case Cancelled():
            return tr("Cancelled while {stage_words}.", stage_words=STAGE_TEXTS[ending.stage])
        case OutOfMemory():
            if ending.requested_bytes is None:
                return ending.message
            free = "" if ending.free_bytes is None else tr(" with {free} free", free=format_bytes(ending.free_bytes))
            asked = format_bytes(ending.requested_bytes)
            return tr(
                "{device} could not allocate {requested}{free} {when}.",
                device=ending.device,
                requested=asked,
                free=free,
                when=stage_words(ending.stage),
            )
        case _:
            return ending.message
