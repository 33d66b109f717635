"""How a request ends early: an exception that carries the last message."""

from __future__ import annotations

import msgspec

from engine.protocol.messages import AllocationFailure, Message
from engine.protocol.messages import Failure as FailureMessage


class EndOfRequest(Exception):
    """Ends the request that is running; `message` is what the parent is told."""

    def __init__(self, message: Message) -> None:
        super().__init__(str(message))
        self.message = message

    def word_of(self, request: int) -> Message:
        """Return the message as the last word of the request with this id."""
        if isinstance(self.message, FailureMessage | AllocationFailure):
            return msgspec.structs.replace(self.message, request=request)
        return self.message


def failure(kind: str, sentence: str) -> EndOfRequest:
    """Return the end with a `Failure`. `kind` is one of the contract's words."""
    return EndOfRequest(FailureMessage(kind=kind, message=sentence))
