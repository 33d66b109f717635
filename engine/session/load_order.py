"""The order to load a plan, whether others may be tried in its place, and what became of each that was tried."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.fit.step_back import Refusal
from engine.fit.strategies.constraints import NO_CONSTRAINTS, Constraints
from engine.language import tr
from engine.layout.layout import Layout
from engine.plan.plan import Plan
from engine.session.events import STAGE_WORDS, Cancelled, Loaded, LoadEnding, OutOfMemory
from engine.units import format_bytes

DEFAULT_RETRIES = 10
"""Where other layouts may be tried and nobody said how many."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Whether other layouts may be tried when one does not fit, and how many; with pinned layers and devices off."""

    retries: int = 0
    constraints: Constraints = NO_CONSTRAINTS


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """One load: what is to be loaded, and what may be tried where that does not fit."""

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
    """One layout that was tried: why this one, and in a sentence what became of it (empty while it is being tried).

    `loaded` False: it was only probed, because what the engine plans for it does not fit.
    """

    number: int
    layout: Layout
    reason: str
    outcome: str = ""
    loaded: bool = False


def refusal_of(event: OutOfMemory) -> Refusal:
    """Return what the device that refused has shown; what lay there is the sum of what had been placed."""
    placed_bytes = next((row.need_bytes for row in event.allocated if row.id == event.device), 0)
    return Refusal(event.device, event.requested_bytes, event.free_bytes, placed_bytes)


def outcome_words(ending: LoadEnding) -> str:
    """Return what became of a layout, as a sentence."""
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
