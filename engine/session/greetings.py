"""Greeting the workers of a load or of a lost child."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.cancellation import CancelToken
from engine.devices.endpoint import Greeting, GreetingStatus, greet_all
from engine.language import tr

Greetings = Mapping[str, Greeting]


def greetings_of(endpoints: Sequence[str], routes: Mapping[str, str], cancel: CancelToken) -> Greetings:
    """Say hello; where this system gives us no sockets, that is the answer of each endpoint."""
    try:
        return greet_all(endpoints, routes=routes, cancel=cancel)
    except OSError as error:
        reason = tr(
            "could not be asked ({strerror}); close other programs and try again", strerror=error.strerror or error
        )
        return {each: Greeting(each, GreetingStatus.REFUSED, f"{each} {reason}.") for each in endpoints}
