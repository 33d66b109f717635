"""One session of a command: its news are taken in the main thread until the command is over. Interrupts stop it."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from app.cli.entry import on_interrupt
from engine.session.driver import News
from engine.session.load_order import LoadOrder
from engine.session.session import ModelSession
from engine.telemetry.memory_holders import memory_holders

INTERRUPT_POLL_S = 0.2
"""Python runs signal handlers in the main thread only: a wait without limit would hold them up on Windows."""


class Follower:
    """A session and its news. `interrupted`: somebody wants it to end."""

    def __init__(self) -> None:
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self.session = ModelSession(self._news.put, holders=memory_holders)
        self.interrupted = False

    @contextmanager
    def loading(self, order: LoadOrder) -> Iterator[None]:
        """Load `order` and see to interrupts; no process of ours is left behind the block."""
        with on_interrupt(self._interrupt):
            try:
                self.session.load(order)
                yield
            finally:
                self.session.close()

    def news(self) -> Iterator[News]:
        """Wait for news, without end; an interrupt stops what runs."""
        stopping = False
        while True:
            if self.interrupted and not stopping:
                stopping = True
                self.session.stop()
            with suppress(queue.Empty):
                yield self._news.get(timeout=INTERRUPT_POLL_S)

    def _interrupt(self) -> None:
        self.interrupted = True
