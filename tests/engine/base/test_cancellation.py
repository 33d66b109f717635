"""The cancellation token, which signal handlers may set while the main thread registers a callback."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from engine.base.cancellation import CancelToken
from tests.support.patience import DEADLINE_S


@pytest.mark.parametrize("at", ["append", "remove"])
def test_a_signal_handler_may_cancel_while_its_thread_registers_a_callback(at: str) -> None:
    token = CancelToken()

    class Interrupted(list[Callable[[], None]]):
        """A list of callbacks, in which a signal arrives: its handler runs in the same thread."""

        def append(self, callback: Callable[[], None], /) -> None:
            if at == "append":
                token.cancel()
            super().append(callback)

        def remove(self, callback: Callable[[], None], /) -> None:
            if at == "remove":
                token.cancel()
            super().remove(callback)

    token._callbacks = Interrupted()
    called: list[str] = []

    def wait() -> None:
        with token.waking(lambda: called.append("woken")):
            pass

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "the handler waits for a lock that its own thread holds"
    assert (token.cancelled, called) == (True, ["woken"])


def test_a_signal_handler_may_cancel_while_its_thread_waits_for_it() -> None:
    """An event would deadlock: the handler waits for a lock that its own thread holds in `wait`."""
    token = CancelToken()

    class Interrupted(list[Callable[[], None]]):
        def append(self, callback: Callable[[], None], /) -> None:
            super().append(callback)
            token.cancel()

    token._callbacks = Interrupted()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(token.wait()), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert found == [True]


def test_a_wait_ends_with_its_time_or_with_the_cancel_of_another_thread() -> None:
    token = CancelToken()
    assert not token.wait(0.0)
    thread = threading.Thread(target=token.cancel)
    thread.start()
    assert token.wait(DEADLINE_S)
    assert token.wait(0.0)
    thread.join()
