"""Greeting endpoints in a thread of its own, for a runner that must not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from engine.cancellation import CancelToken
from engine.devices.endpoint import DEFAULT_TIMEOUT_S, Greeting, GreetingStatus, greet_all

Greetings = Mapping[str, Greeting]


class Greeter:
    """At most one round of greetings counts at a time. All calls from one thread."""

    def __init__(self) -> None:
        self._cancel = CancelToken()
        self._threads: list[threading.Thread] = []

    def greet(self, endpoints: Sequence[str], then: Callable[[Greetings], None]) -> None:
        """Say hello to `endpoints`; `then` is called in another thread, also after a cancel."""
        cancel = self._cancel = CancelToken()
        thread = threading.Thread(
            target=lambda: then(greetings_of(endpoints, cancel)), name="runner-greeter", daemon=True
        )
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def cancel(self) -> None:
        """End the round that runs; what has not answered counts as timed out."""
        self._cancel.cancel()

    def join(self) -> None:
        """Wait, bounded, for rounds that were cancelled."""
        for thread in self._threads:
            thread.join(DEFAULT_TIMEOUT_S)


def greetings_of(endpoints: Sequence[str], cancel: CancelToken) -> Greetings:
    """Say hello; where this system gives us no sockets, that is the answer of each endpoint."""
    try:
        return greet_all(endpoints, cancel=cancel)
    except OSError as error:
        reason = f"could not be asked ({error.strerror or error}); close other programs and try again"
        return {each: Greeting(each, GreetingStatus.REFUSED, f"{each} {reason}.") for each in endpoints}
