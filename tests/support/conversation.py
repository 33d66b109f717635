"""A real worker to talk to: one request, the messages up to its answer, and an end that is waited for."""

from __future__ import annotations

import queue
import time

from engine.runtime.process.child import ChildProcess
from engine.runtime.process.outcome import ProcessOutcome
from engine.runtime.protocol.messages import AnyMessage, Hello, Piece, Reading, StageProgress
from engine.runtime.protocol.requests import AnyRequest
from tests.support.patience import DEADLINE_S


class ChildEndedError(AssertionError):
    """The worker ended where an answer was due."""

    def __init__(self, outcome: ProcessOutcome) -> None:
        super().__init__(f"the child ended: {outcome}")
        self.outcome = outcome


class Conversation:
    """A worker as a context manager. `heard` are the messages before the last answer: progress and pieces."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[AnyMessage | ProcessOutcome] = queue.SimpleQueue()
        self._child = ChildProcess(self._messages.put, self._messages.put, name="conversation")
        self.heard: list[AnyMessage] = []

    def __enter__(self) -> Conversation:
        self._child.start()
        self._child.watch(False)
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()
        assert self._child.wait(DEADLINE_S) is not None, "the child did not end"

    @property
    def pid(self) -> int:
        """The worker's process id."""
        assert self._child.pid is not None
        return self._child.pid

    def send(self, request: AnyRequest) -> None:
        """Send without waiting."""
        self._child.send(request)

    def ask(self, request: AnyRequest, timeout_s: float = DEADLINE_S) -> AnyMessage:
        """Send and return the answer; fails when the child ends instead or says nothing for too long."""
        self.send(request)
        return self.answer(timeout_s)

    def answer(self, timeout_s: float = DEADLINE_S) -> AnyMessage:
        """Return the next message that ends a request."""
        self.heard = []
        deadline_s = time.monotonic() + timeout_s
        while True:
            message = self._messages.get(timeout=max(0.0, deadline_s - time.monotonic()))
            if isinstance(message, ProcessOutcome):
                raise ChildEndedError(message)
            if not isinstance(message, Hello | StageProgress | Reading | Piece):
                return message
            self.heard.append(message)
