"""Looks for what would fit instead of a plan that is forecast not to, beside the GUI thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from app.background import Background
from engine.cancellation import CancelToken
from engine.errors import EngineError
from engine.fit.proposal import ALL_KINDS, Proposal
from engine.fit.strategies.constraints import Constraints
from engine.plan.plan import Plan

_KINDS = tuple(kind for kind in ALL_KINDS if kind != "unload")
"""Who has to go is a question of its own."""


class BestProposal:
    """One search at a time; a newer one ends what runs."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._token: CancelToken | None = None

    def find(self, plan: Plan, constraints: Constraints, then: Callable[[Proposal | None], None]) -> None:
        """Call `then` with the proposal for `plan` that keeps most of it, or None; never, where it was cancelled."""
        self.cancel()
        token = self._token = CancelToken()

        def look() -> Proposal | None:
            # The searches use much that the window's start can do without.
            from engine.fit.proposals import best_by_forecast
            from engine.fit.strategies.constraints import Watch

            return best_by_forecast(plan.with_own_tables(), replace(constraints, watch=Watch(token)), _KINDS)

        def tell(found: Proposal | None) -> None:
            if not token.cancelled:
                then(found)

        def skip(_error: EngineError) -> None:
            tell(None)

        self._background.run("Finding what fits", look, tell, skip, quiet=True)

    def cancel(self) -> None:
        """End the search that runs."""
        if self._token is not None:
            self._token.cancel()
