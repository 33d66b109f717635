"""The order to load a plan, and whether others may be tried in its place."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.fit.strategies.constraints import NO_CONSTRAINTS, Constraints
from engine.plan.plan import Plan

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
