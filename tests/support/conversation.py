"""A real model child for tests: sends a request, and returns the message that answers it."""

from __future__ import annotations

import queue
import time

from engine.runtime.process.child import ChildProcess
from engine.runtime.process.outcome import ProcessOutcome
from engine.runtime.protocol.messages import AnyMessage, Hello, Piece, Reading, StageProgress
from engine.runtime.protocol.requests import AnyRequest
from tests.support.patience import DEADLINE_S


class ChildEndedError(AssertionError):
    """The child ended before it answered."""

    def __init__(self, outcome: ProcessOutcome) -> None:
        super().__init__(f"the child ended: {outcome}")
        self.outcome = outcome


class Conversation:
    """A model child as a context manager. `heard`: progress messages and pieces before the last answer."""

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
        """The child's process id."""
        assert self._child.pid is not None
        return self._child.pid

    def send(self, request: AnyRequest) -> None:
        """Send a request without waiting for the answer."""
        self._child.send(request)

    def ask(self, request: AnyRequest, timeout_s: float = DEADLINE_S) -> AnyMessage:
        """Send a request and return the answer.

        Raises:
            ChildEndedError: the child ended before it answered.
            queue.Empty: no answer within `timeout_s`.
        """
        self.send(request)
        return self.answer(timeout_s)

    def answer(self, timeout_s: float = DEADLINE_S) -> AnyMessage:
        """Return the next message that is neither progress nor a piece.

        Raises:
            ChildEndedError: the child ended before it answered.
            queue.Empty: no answer within `timeout_s`.
        """
        self.heard = []
        deadline_s = time.monotonic() + timeout_s
        while True:
            message = self._messages.get(timeout=max(0.0, deadline_s - time.monotonic()))
            if isinstance(message, ProcessOutcome):
                raise ChildEndedError(message)
            if not isinstance(message, Hello | StageProgress | Reading | Piece):
                return message
            self.heard.append(message)
