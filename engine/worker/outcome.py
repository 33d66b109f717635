"""How a request ends early: an exception that carries the last message."""

from __future__ import annotations

from engine.runner.protocol import Failure as FailureMessage
from engine.runner.protocol import Message


class EndOfRequest(Exception):
    """Ends the request that is running; `message` is what the parent is told."""

    def __init__(self, message: Message) -> None:
        super().__init__(str(message))
        self.message = message


def failure(kind: str, sentence: str) -> EndOfRequest:
    """Return the end with a `Failure`. `kind` is one of the contract's words."""
    return EndOfRequest(FailureMessage(kind=kind, message=sentence))
