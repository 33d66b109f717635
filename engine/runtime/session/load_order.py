"""The order to load a plan, whether other layouts may be tried instead, and the result of each attempt."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.planning.fit.step_back import Refusal
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, Constraints
from engine.planning.layout.layout import Layout
from engine.planning.plan.plan import Plan
from engine.runtime.session.events import STAGE_WORDS, Cancelled, Loaded, LoadEnding, OutOfMemory

DEFAULT_RETRIES = 10
"""Default number of other layouts, if others may be tried."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How many other layouts may be tried if one does not fit, and their constraints (pinned layers, devices off)."""

    retries: int = 0
    constraints: Constraints = NO_CONSTRAINTS


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """One load: the plan, and what may be tried if it does not fit."""

    plan: Plan
    retry: RetryPolicy = RetryPolicy()

    def with_plan(self, plan: Plan) -> LoadOrder:
        """Return the order for another plan."""
        return replace(self, plan=plan)

    def possible_endpoints(self) -> frozenset[str]:
        """Return the workers that this load may turn to: its layout's, and every one where other layouts are tried."""
        used = self.plan.used_endpoints
        if not self.retry.retries:
            return frozenset(used)
        # One that works for another model of ours has nothing free, so that no step back leads there.
        devices = self.plan.rig.devices
        idle = (device.endpoint for device in devices if device.endpoint is not None and not device.holdings)
        return frozenset((*used, *idle))


FIRST_REASON = tr("The layout as it was asked for.")


@dataclass(frozen=True, slots=True)
class LoadAttempt:
    """One layout that was tried. `reason`: why this one. `outcome`: a sentence, empty while it is being tried.

    `loaded`: False if it was only probed, because the engine's forecast does not fit.
    """

    number: int
    layout: Layout
    reason: str
    outcome: str = ""
    loaded: bool = False


def refusal_of(event: OutOfMemory) -> Refusal:
    """Return the refusal of a device, with the bytes that had been placed there before."""
    placed_bytes = next((row.need_bytes for row in event.allocated if row.id == event.device), 0)
    return Refusal(event.device, event.requested_bytes, event.free_bytes, placed_bytes)


def outcome_words(ending: LoadEnding) -> str:
    """Return the result of a layout as a sentence."""
    match ending:
        case Loaded():
            return tr("Loaded.")
        case Cancelled():
            return tr("Cancelled while {stage_words}.", stage_words=STAGE_WORDS[ending.stage])
        case OutOfMemory():
            free = "" if ending.free_bytes is None else tr(" with {free} free", free=format_bytes(ending.free_bytes))
            asked = format_bytes(ending.requested_bytes)
            return tr(
                "{device} refused {asked}{free} while {stage_words}.",
                device=ending.device,
                asked=asked,
                free=free,
                stage_words=STAGE_WORDS[ending.stage],
            )
        case _:
            return ending.message
