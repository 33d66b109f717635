"""How far a search for a layout is, for those who wait for it and may have enough of waiting."""

from __future__ import annotations

from collections.abc import Callable

from engine.cancellation import CancelToken
from engine.errors import CancelledError
from engine.language import tr


class Watch:
    """Counts the layouts that one search has tried, tells the number, and ends the search once the token is set."""

    def __init__(self, token: CancelToken | None = None, tell: Callable[[int], None] | None = None) -> None:
        self.n_tried = 0
        self._token = token
        self._tell = tell

    @property
    def is_over(self) -> bool:
        """Whether nobody waits any more; for who looks in the middle of trying a layout."""
        return self._token is not None and self._token.cancelled

    def step(self) -> None:
        """Note that a layout is about to be tried.

        Raises:
            CancelledError: nobody waits for the answer any more.
        """
        if self.is_over:
            raise CancelledError(tr("The search for a layout was cancelled."))
        self.n_tried += 1
        if self._tell is not None:
            self._tell(self.n_tried)
